"""What a run tells about itself: the report and the provenance that every output carries."""

import threading

import numpy as np

from kda_engine.finite import NotFinite, token_place
from kda_engine.hdf5.opening import digest
from kda_engine.hdf5.schema import STATE_RESULTS, TOKEN_RESULTS
from kda_engine.hdf5.version import hdf5_version

from .environment import mpi_version
from .messages import counted
from .mpi import MPI
from .provenance import provenance

# All phases of a run, in the order of its work; a rank may have no part in some of them.
PHASES = ("read", "prepare", "summarise", "gather", "scan", "forward", "backward", "reduce", "bounds", "write")

# Tensors that hold NaN by design: a rank that feeds nobody has no boundary.
UNFILLED = "boundary/"

PACKAGES = ("numpy", "h5py", "mpi4py", "cupy-cuda13x", "cupy-cuda12x")


class Digest:
    """The SHA-256 of a file, computed beside the real work."""

    def __init__(self, path):
        self._value, self._error = None, None
        self._thread = threading.Thread(target=self._work, args=(path,), daemon=True)
        self._thread.start()

    def _work(self, path):
        try:
            self._value = digest(path)
        except BaseException as error:  # handed to whoever asks for the value
            self._error = error

    def value(self):
        """The hex digest; waits for it. Raises what reading the file raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value


def describe(run, skips, input_digest, parts):
    """(report, provenance) as dicts of JSON values on rank 0, (None, None) elsewhere. Collective.

    skips: every rank's rows on dropped transitions (`RankProblem.skip_rows`). parts: this rank's `gathering.Part`s,
    whose rows have all been looked at.

    Time of the phase "write" is that until the tensors are handed over; closing the file comes after.
    """
    session, phases = run.session, run.clock.so_far()
    mine = {
        "rank": session.rank, "host": MPI.Get_processor_name(), "threads": run.threads,
        "device": session.device,
        "tokens": [run.segment.start, run.segment.stop],
        "heads": None if run.heads is None else [run.heads[session.rank].start, run.heads[session.rank].stop],
        "pieces": [[p.sequence, p.start, p.stop] for p in run.segment.pieces],
        "seconds": {phase: seconds for phase, (seconds, _) in phases.items()},
        "bytes": {phase: sent for phase, (_, sent) in phases.items()},
        "bytes_sent": run.bytes_sent(), "memory_bytes": run.memory, "paths": run.paths,
    }
    seen = [(part.name, part.not_finite) for part in parts if not part.name.startswith(UNFILLED)]
    rows, seen, within = zip(*session.control.collect((mine, seen, run.within), "collecting the report"))
    if session.rank:
        return None, None
    skips = accumulate_bounds([row for of_rank in skips for row in of_rank])
    within = finite_rows([row for of_rank in within for row in of_rank])
    report = {
        "job": run.job.to_dict(), "options": run.options.to_dict(), "engine": run.engine.name,
        "scan": run.problem.route.name, "scan_reason": run.problem.reason, "shard": run.job.shard,
        "piece_length": run.piece_length,
        "transport": run.transport.name, "cu_seqlens": run.source.cu_seqlens.tolist(),
        "ranks": list(rows), "decay_skip": skips, "device_skip": within,
        "dropped_total": dropped_total(skips, within), "not_finite": not_finite(seen, run.source.cu_seqlens),
    }
    return report, {
        **provenance(PACKAGES), "input_sha256": input_digest.value(), "ranks": session.size,
        "devices": sorted({row["device"] for row in rows}),
        "mpi_library": mpi_version(),
        "hdf5": hdf5_version(),
    }


def not_finite(seen, cu_seqlens):
    """By tensor with NaN or infinities: {"count": values, "first": the place of the first} for the report.

    seen: every rank's (tensor's name, `finite.NotFinite`). The place is {"sequence", "head", "token"} of a tensor with
    a row per token, the token counted within its sequence; {"sequence", "head"} of states; {"head"} of the parameters'
    gradients; {"channel"} of the convolution's.
    """
    whole = {}
    for name, found in (row for of_rank in seen for row in of_rank):
        whole.setdefault(name, NotFinite()).merge(found.count, found.first)
    return {name: {"count": found.count, "first": _place(name, *found.first, cu_seqlens)}
            for name, found in whole.items() if found.count}


def _place(name, row, second, cu_seqlens):
    if name in TOKEN_RESULTS:
        sequence, token = token_place(row, cu_seqlens)
        return {"sequence": sequence, "head": second, "token": token}
    if name in STATE_RESULTS:
        return {"sequence": row, "head": second}
    return {"channel": row} if name.startswith("grads/conv/") else {"head": row}


def summary(report, path, wall):
    """Lines for rank 0's standard output: what was written, the slowest rank's time and all ranks' bytes by phase; wall: the
    seconds of rank 0 from its start to the end, of which it spent some outside of every phase.
    """
    ranks = report["ranks"]
    tokens = report["cu_seqlens"][-1]
    phases = sorted({phase for row in ranks for phase in row["seconds"]}, key=PHASES.index)
    dropped = sum(row["fallback"].count(False) for row in (*report["decay_skip"], *report["device_skip"]))
    lines = [f"wrote {path}: {counted(tokens, 'token')}, {counted(len(ranks), 'rank')}, engine {report['engine']}, scan {report['scan']}",
             f"{'phase':<12}{'seconds':>10}{'bytes sent':>14}"]
    for phase in phases:
        seconds = max(row["seconds"].get(phase, 0.0) for row in ranks)
        lines.append(f"{phase:<12}{seconds:>10.4f}{sum(row['bytes'].get(phase, 0) for row in ranks):>14}")
    outside = max(0.0, wall - sum(ranks[0]["seconds"].values()))
    lines.append(f"{'outside':<12}{outside:>10.4f}  start-up, agreements, the end of the output")
    lines.append(f"{'total':<12}{wall:>10.4f}  {tokens / wall:.4g} tokens a second")
    lines.append(f"sent between ranks: {sum(row['bytes_sent'] for row in ranks)} bytes")
    if dropped:
        rule = report["options"]["decay_skip"] or "certified"
        lines.append(f"transitions dropped by the {rule} rule: {dropped} heads")
    for name, found in report["not_finite"].items():
        place = ", ".join(f"{axis} {number}" for axis, number in found["first"].items())
        lines.append(f"not finite: {name}: {counted(found['count'], 'value')}, the first at {place}")
    return "\n".join(lines)


def accumulate_bounds(rows):
    """Add to every row `total_bound` [HV]: its own bound and what earlier boundaries of its sequence leave of theirs.

    A boundary's error passes on through the next segment's transition, whose norm is at most e^log_transition.
    The rule "sampled" proves nothing: None. JSON knows no infinities: the largest number of a sign stands for them.
    """
    for direction, order in (("forward", 1), ("backward", -1)):
        carried = {}
        for row in sorted((r for r in rows if r["direction"] == direction), key=lambda r: order * r["rank"]):
            if row["rule"] == "sampled":
                row["bound"] = row["total_bound"] = None
                continue
            before = carried.get(row["sequence"], np.zeros(len(row["bound"])))
            with np.errstate(over="ignore", invalid="ignore"):
                passed = np.where(before == 0, 0.0, np.exp(row["log_transition"]) * before)
            row["total_bound"] = carried[row["sequence"]] = np.asarray(row["bound"]) + passed
    return finite_rows(rows)


def finite_rows(rows):
    """The rows with the largest number of a sign for infinities and, as the upper bound that it is, for NaN."""
    largest = np.finfo("f8").max
    for row in rows:
        for name in ("log_norm", "log_transition", "bound", "total_bound"):
            if row.get(name) is not None:
                row[name] = np.nan_to_num(row[name], nan=largest).tolist()
    return rows


def dropped_total(skips, within):
    """One bound on the Frobenius norm of the error of every state, and gradient of a state, of the run, beside rounding:
    the sum over all drops, at boundaries of ranks and at cuts within a device; None under a rule that proves nothing.
    """
    if any(row["rule"] == "sampled" for row in skips):
        return None
    with np.errstate(over="ignore"):
        total = sum(np.sum(row["total_bound"]) for row in skips) + sum(np.sum(row["bound"]) for row in within)
    return float(np.nan_to_num(total, nan=np.finfo("f8").max))
