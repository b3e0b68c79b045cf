"""`bench compare`: whether what one record measured has become slower in another."""

from kda_engine.bench.record import read_record
from kda_engine.bench.verdict import SLOWER, compare_records
from kda_engine.errors import InputError

from ..exit_codes import MISMATCH, NOTHING_COMPARED, PASS
from .share import parse_share


def add(modes):
    parser = modes.add_parser(
        "compare", help="tell whether one record is slower than another",
        description="Prints the ratio of medians B / A of every case that is in both records, divided by the ratio of "
                    "the control (the same work in both records, measured in turn with the case), with a 95 %% "
                    "bootstrap interval. 'ambiguous': the interval holds 1. Exit code 1: a case is slower beyond the "
                    "limit; 2: the machines differ, or the problems under a name do; 77: no case is in both records.")
    parser.add_argument("a", metavar="A.json", help="record before the change")
    parser.add_argument("b", metavar="B.json", help="record after the change")
    parser.add_argument("--fail-slower", default="5%", metavar="X", help="how much slower is allowed (5%%)")
    parser.set_defaults(run=main)


def main(args):
    """Print a line a case. Raises InputError."""
    limit = parse_share("fail-slower", args.fail_slower)
    verdicts = compare_records(read_record(args.a), read_record(args.b), limit)
    if not verdicts:
        print("nothing to compare: no case was timed in both records")
        return NOTHING_COMPARED
    head = ("case", "A ms", "B ms", "control", "ratio", "interval", "verdict")
    rows = [(v.name, f"{1e3 * v.before:.4g}", f"{1e3 * v.after:.4g}", f"{v.control:.3f}", f"{v.ratio:.3f}",
             f"{v.low:.3f} to {v.high:.3f}", v.word) for v in verdicts]
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return MISMATCH if any(v.word == SLOWER for v in verdicts) else PASS
