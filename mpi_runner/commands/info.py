"""`info`: the environment report."""

import json

from ..exit_codes import PASS
from ..launched import launched


def add(subparsers):
    parser = subparsers.add_parser(
        "info", help="report versions, processors, memory, MPI, HDF5 and GPU",
        description="Under mpirun it also tells the host, cores and GPU of every rank.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=main)


def main(args):
    """Print the report; collective where a launcher started this process."""
    from ..environment import describe

    if not launched():
        _tell(describe(), args.json)
        return PASS
    # MPI starts with this import, only where a launcher wants it.
    from ..environment import gpus, mpi_library
    from ..rank_table import mark_shared, rank_row
    from ..session import Session

    with Session() as session:
        rows = session.control.collect(rank_row(session, gpus()), "collecting the ranks")
        if session.rank == 0:
            _tell({**describe(mpi_library(session.comm)), "ranks": mark_shared(rows)}, args.json)
        session.control.largest(0, "finishing the report")
    return session.code


def _tell(report, as_json):
    from ..rank_table import render

    if as_json:
        print(json.dumps(report, indent=2))
        return
    rows = report.pop("ranks", None)
    print("\n".join(_lines(report)) + ("" if rows is None else f"\n\n{render(rows)}"))


def _lines(value, name="", depth=-1):
    """Nested values as indented lines."""
    indent = "  " * depth
    if isinstance(value, dict):
        if name:
            yield f"{indent}{name}:"
        for key, item in value.items():
            yield from _lines(item, key, depth + 1)
    elif isinstance(value, list):
        yield f"{indent}{name}:" + ("" if value else " none")
        for number, item in enumerate(value):
            yield from _lines(item, str(number), depth + 1)
    else:
        yield f"{indent}{name}: {'none' if value is None else value}"
