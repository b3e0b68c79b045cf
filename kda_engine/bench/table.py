"""A benchmark's record as a Markdown page."""

import numpy as np

from .record import OURS, case_name, peers_of
from .samples import median, spread

# Parts of a case that every row names; the others are said once where all rows agree.
ALWAYS = ("what", "shape", "regime")


def markdown(record):
    """The page: where it comes from, one table of the record's mode, what failed its check."""
    table = {"engine": _engine, "collectives": _collectives, "scaling": _scaling}[record["mode"]]
    timed = [row for row in record["rows"] if "samples" in row]
    failed = [f"- {case_name(row)}: error {_error(row)}, allowed {row['allowed']:.0e}: not timed"
              for row in record["rows"] if "samples" not in row]
    parts = [_origin(record), table(record, timed)] if timed else [_origin(record)]
    if failed:
        parts.append("\n".join(["Failed their check:", "", *failed]))
    kernels = _kernels(timed)
    if kernels:
        parts.append(kernels)
    return "\n\n".join(parts)


def _origin(record):
    by, machine = record["provenance"], record["machine"]
    lines = [", ".join([machine["name"], *(f"{what} {n}" for what, n in machine.items() if what != "name")]),
             f"{by['utc']}, kda-engine {by['engine_version']}, commit {(by['commit'] or 'unknown')[:7]}, "
             f"`{' '.join(by['command'])}`"]
    if record["ceilings"]:
        lines.append(f"copy {record['ceilings']['bandwidth'] / 1e9:.1f} GB/s, matrix product "
                     f"{record['ceilings']['matrix_rate'] / 1e9:.0f} GFLOP/s")
    notes = _disturbances(record["rows"])
    return "  \n".join(lines + ([notes] if notes else []))


def _disturbances(rows):
    """What may have disturbed the measurements, over all rows."""
    states = [state for row in rows for state in row.get("state", {}).values()]
    parts = []
    for key, name in (("load", "load average"), ("sm_mhz", "SM clock in MHz"), ("celsius", "degrees Celsius")):
        seen = [state[key] for state in states if key in state]
        if seen:
            parts.append(f"{name} {min(seen):.4g} to {max(seen):.4g}")
    reasons = sorted({reason for state in states for reason in state.get("lowered_by", ())})
    return ", ".join(parts + ([f"clocks lowered by {', '.join(reasons)}"] if reasons else []))


def _engine(record, rows):
    ceilings = record["ceilings"]
    peers = sorted({peer for row in rows for peer in peers_of(row)})
    name, common = _names(rows)
    head = ["case", "error", "ms", "spread", "floor ms", "of bandwidth", "of matrix rate", "host us", "peak GiB"]
    cells = []
    for row in rows:
        ours = median(row["samples"][OURS])
        cell = [name(row), f"{row['error']:.1e}", *_time(row["samples"][OURS])]
        if "bytes" in row:
            floor = row["bytes"] / ceilings["bandwidth"]
            rate = row["flops"] / ours
            cell += [f"{1e3 * floor:.4g}", f"{floor / ours:.1%}", f"{rate / ceilings['matrix_rate']:.1%}"]
        else:
            cell += ["", "", ""]
        host = row.get("host_seconds")
        cell.append("" if host is None else f"{1e6 * host:.0f}")
        cell.append(f"{row['peak_bytes'] / 2**30:.3g}" if "peak_bytes" in row else "")
        for peer in peers:
            if peer in row["samples"]:
                theirs = median(row["samples"][peer])
                cell += [f"{1e3 * theirs:.4g}", f"{theirs / ours:.2f}", f"{row['peer_errors'][peer]:.1e}"]
            else:
                cell += ["", "", ""]
        cells.append(cell)
    head += [title for peer in peers for title in (f"{peer} ms", f"{peer} / ours", f"{peer} from ours")]
    paths = [row.get("path") for row in rows]
    if len(set(paths)) > 1:
        head, cells = [*head, "path"], [[*cell, path or ""] for cell, path in zip(cells, paths)]
    elif paths[0]:
        common += f", path {paths[0]}"
    return f"all: {common}\n\n" + pipe_table(head, cells)


def _names(rows):
    """(row -> its case's name without what all rows have in common, that)."""
    parts = [part for part in rows[0]["case"] if part not in ALWAYS]
    shared = [part for part in parts if len({row["case"][part] for row in rows}) == 1]
    told = [part for part in rows[0]["case"] if part not in shared]
    name = lambda row: " ".join(row["case"][part] for part in told)
    return name, ", ".join(f"{part} {rows[0]['case'][part]}" for part in shared)


def _collectives(record, rows):
    head = ["collective", "transport", "ranks", "value heads", "KiB a rank", "ms", "spread", "min", "mean", "max",
            "GB/s a rank"]
    cells = []
    for row in rows:
        taken = row["samples"][OURS]
        cells.append([*map(str, row["case"].values()), f"{row['bytes'] / 1024:.1f}", *_time(taken),
                      *(_digits(x, 3) for x in (min(taken), sum(taken) / len(taken), max(taken))),
                      f"{row['bytes'] / median(taken) / 1e9:.3g}"])
    return pipe_table(head, cells)


def _scaling(record, rows):
    """Speed-up against the fewest ranks of the same scan and transport, and how much of the ranks' number that is."""
    fewest = {}
    for row in rows:
        fewest.setdefault((row["case"]["scan"], row["case"]["transport"]), row)
    case = rows[0]["case"]
    cells = []
    for row in rows:
        base, taken = fewest[row["case"]["scan"], row["case"]["transport"]], row["samples"][OURS]
        speed_up = median(base["samples"][OURS]) / median(taken)
        efficiency = speed_up * base["case"]["ranks"] / row["case"]["ranks"]
        cells.append([row["case"]["scan"], row["case"]["transport"], str(row["case"]["ranks"]), f"{row['error']:.1e}",
                      *_time(taken), f"{speed_up:.2f}", f"{efficiency:.0%}"])
    head = ["scan", "transport", "ranks", "error", "ms", "spread", "speed-up", "efficiency"]
    of = f"{case['what']} {case['shape']} {case['regime']}, engine {case['engine']}, skip {case['skip']}"
    return f"{of}\n\n" + pipe_table(head, cells)


def _kernels(rows):
    cells = [[case_name(row), name, *_time(taken)]
             for row in rows for name, taken in row.get("kernels", {}).items()]
    return pipe_table(["case", "kernel", "ms", "spread"], cells) if cells else ""


def _error(row):
    return "not finite" if row["error"] is None else f"{row['error']:.1e}"


def _time(samples):
    """Median and spread in milliseconds, four and two digits, without exponents."""
    return [_digits(median(samples), 4), _digits(spread(samples), 2)]


def _digits(seconds, count):
    """Milliseconds with so many digits."""
    return np.format_float_positional(1e3 * seconds, precision=count, fractional=False, trim="-")


def pipe_table(head, rows):
    """A Markdown table of words."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])
