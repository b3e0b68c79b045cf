"""Run under mpirun: certified decay skip against exact runs of the same cuts. Rank 0 prints a JSON line.

Every boundary state and gradient of the certified run must lie within the bound that its report states.
Argument: a folder for files.
"""

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from mpi.all_cases import random_cuts, write_case

from kda_engine import cases
from kda_engine.hdf5.results import ResultFile
from kda_engine.layout import CHUNK
from mpi_runner.job import Job
from mpi_runner.main_job import run_job
from mpi_runner.session import Session

TOLERANCE = 1e-6

# Long enough that a share holds a warm-up, where the ordinary size does not.
LONGER = {"strong": {"tokens": 1500}, "thousands": {"tokens": 300}, "saturated": {"tokens": 600},
          "heads-differ": {"tokens": 600}, "ordinary": {"tokens": 600}, "relay": {"tokens": 256}}


def one_sided():
    """Shares of three chunks on four ranks, some expanding first and decaying last: certified in one direction."""
    case = cases.make("expanding", dtype="f8", tokens=12 * CHUNK)
    k = case.k * (2**0.5 / np.linalg.norm(case.k, axis=-1, keepdims=True))
    decays = np.repeat(np.array([0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0]), CHUNK)
    # A token's bound: -1.5 + log(1.4), or log(1.4); one decaying chunk alone is below the tolerance, a share is not.
    g = np.zeros_like(case.g) - 1.5 * decays[:, None, None]
    return replace(case, k=k, g=g, beta=np.full_like(case.beta, 1.2), A_log=None, dt_bias=None,
                   options=replace(case.options, gate="log"))


def boundaries(path):
    """(S_in, dS_out, report rows) of an output."""
    with ResultFile(path) as result:
        return result.read("boundary/S_in"), result.read("boundary/dS_out"), result.report["decay_skip"]


def check(exact, certified, rows):
    """Report lines that do not hold, the number of boundaries looked at and of heads dropped."""
    wrong, looked_at, dropped = [], 0, 0
    for direction, which, towards in (("forward", 0, 1), ("backward", 1, -1)):
        for row in (r for r in rows if r["direction"] == direction):
            dropped += row["fallback"].count(False)
            for head, log_norm in enumerate(row["log_norm"]):
                if not row["fallback"][head] and not log_norm < math.log(TOLERANCE):
                    wrong.append(f"{direction} head {head} of rank {row['rank']}: dropped at log norm {log_norm}")
            # The boundary that this row's piece feeds: that of the next rank along the sequence.
            fed = [r["rank"] for r in rows if r["direction"] != direction and r["sequence"] == row["sequence"]
                   and (r["rank"] - row["rank"]) * towards > 0]
            if not fed:
                wrong.append(f"no fed rank for {row}")
                continue
            rank = min(fed) if towards > 0 else max(fed)
            a, b = certified[which][rank].astype("f8"), exact[which][rank].astype("f8")
            for head, bound in enumerate(row["total_bound"]):
                looked_at += 1
                error = np.linalg.norm(a[head] - b[head])
                rounding = 1e-12 * max(np.linalg.norm(b[head]), 1.0)
                if not error <= bound + rounding:
                    wrong.append(f"{direction} rank {rank} head {head}: error {error:.3e} above bound {bound:.3e}")
    return wrong, looked_at, dropped


def main(folder):
    source = folder / "skip.h5"
    random_source = random.Random(1)
    failures, looked_at, dropped, fallbacks = [], 0, {}, {}
    with Session(timeout=60) as session:
        problems = {name: cases.make(name, dtype="f8", **LONGER.get(name, {})) for name in cases.names()}
        for name, case in {**problems, "one-sided": one_sided()}.items():
            if int(case.lengths.sum()) == 0:
                continue
            for cuts in (None, random_cuts(case.lengths, session.size, random_source)):
                if session.rank == 0:
                    write_case(case, source)
                session.control.largest(0, "the input is there")
                results = []
                for rule, tolerance in (("exact", 0.0), ("certified", TOLERANCE)):
                    output = folder / f"skip-{rule}.h5"
                    run_job(session, Job.resolve({
                        "input": str(source), "output": str(output), "backward": True, "force": True, "engine": "numpy",
                        "decay_skip": rule, "tolerance": tolerance, "save_boundary": True}, None), cuts)
                    if session.rank == 0:
                        results.append(boundaries(output))
                if session.rank == 0:
                    wrong, seen, gone = check(results[0][:2], results[1][:2], results[1][2])
                    failures += [f"{name} cuts {cuts}: {text}" for text in wrong]
                    looked_at += seen
                    dropped[name] = dropped.get(name, 0) + gone
                    fallbacks[name] = all(all(row["fallback"]) for row in results[1][2])
    if session.rank == 0:
        print(json.dumps({"looked_at": looked_at, "failures": failures, "dropped": dropped, "fallbacks": fallbacks}),
              flush=True)
    return session.code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
