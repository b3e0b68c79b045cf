"""`info`: the environment report."""

import json

from ..exit_codes import PASS


def add(subparsers):
    parser = subparsers.add_parser("info", help="report versions, processors, memory, MPI, HDF5 and GPU")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=main)


def main(args):
    """Print the report."""
    from ..environment import describe

    report = describe()
    print(json.dumps(report, indent=2) if args.json else "\n".join(_lines(report)))
    return PASS


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
