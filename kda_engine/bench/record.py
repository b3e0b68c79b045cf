"""The file of one benchmark run: who measured what on which machine, every sample of it.

A record is plain JSON:

    format, format_version, mode ("engine" or "collectives"), provenance, machine
    ceilings    what the machine was measured to reach: bandwidth (bytes/s), matrix_rate (FLOP/s); engine runs only
    rows        one per measured case: {"case": what identifies it, "problem": what it consisted of,
                "path": what computed the forward (the first records do not say), "error" (None: not finite),
                "allowed", "samples": side -> seconds, ...}; a case that failed its check has no samples
"""

import csv
import json
from pathlib import Path

from ..errors import InputError

FORMAT, FORMAT_VERSION = "kda-engine-bench", 1

# Sides of the samples: this engine's, and a fixed piece of work, timed in turn with it, that tells how fast the machine
# was then (another one would need another FORMAT_VERSION). All others are peers.
OURS, CONTROL = "ours", "control"


def make_record(mode, provenance, machine, ceilings, rows):
    """The record as a dict."""
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "mode": mode, "provenance": provenance,
            "machine": machine, "ceilings": ceilings, "rows": rows}


def write_record(path, record):
    """Write it as JSON. Raises InputError where that is not possible."""
    try:
        Path(path).write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"output: cannot write {path}: {error.strerror}") from None


def write_csv(path, record):
    """Write every sample as a row: what identifies its case, the side, the number of the sample, seconds. Raises InputError
    where that is not possible.
    """
    rows = [row for row in record["rows"] if "samples" in row]
    case = list(dict.fromkeys(name for row in rows for name in row["case"]))
    try:
        with open(path, "w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow([*case, "side", "sample", "seconds"])
            for row in rows:
                of_case = [row["case"].get(name, "") for name in case]
                for side, taken in row["samples"].items():
                    lines.writerows([*of_case, side, number, repr(seconds)] for number, seconds in enumerate(taken))
    except OSError as error:
        raise InputError(f"csv: cannot write {path}: {error.strerror}") from None


def read_record(path):
    """The record in a file. Raises InputError for anything else."""
    try:
        record = json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: expected JSON: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise InputError(f"{path}: expected a benchmark record, got something else")
    if record.get("format_version") != FORMAT_VERSION:
        raise InputError(f"{path}: expected version {FORMAT_VERSION} of the record, got {record.get('format_version')}")
    for row in record["rows"]:
        row["case"] = _with_gate(row["case"])
    return record


def _with_gate(case):
    """The case with its gate: the first records do not name the only one that was measured then."""
    if "gate" in case or "regime" not in case:
        return case
    before = list(case).index("regime") + 1
    parts = list(case.items())
    return dict([*parts[:before], ("gate", "lower_bound"), *parts[before:]])


def peers_of(row):
    """The peers that a timed row has samples of."""
    return [side for side in row["samples"] if side not in (OURS, CONTROL)]


def case_name(row):
    """A row's case in words."""
    return " ".join(str(value) for value in row["case"].values())
