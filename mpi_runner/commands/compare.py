"""`compare`: two result files, tensor by tensor."""

import difflib
import json

from kda_engine.bench.plots import require_matplotlib
from kda_engine.compare import tolerance_for
from kda_engine.errors import InputError
from kda_engine.hdf5.matching import compare_tensor, names_to_match
from kda_engine.hdf5.results import ResultFile

from ..exit_codes import MISMATCH, NOTHING_COMPARED, PASS
from ..goldens import telling
from ..goldens.heat_map import write_heat_map
from ..goldens.judging import Judgement, Verdict, blocks_of


def add(subparsers):
    parser = subparsers.add_parser(
        "compare", help="compare two outputs, tensor by tensor",
        description="Prints the relative Frobenius error of every tensor of A against B (outputs or goldens). Exit "
                    "code 0: all are within the tolerance; 1: some are not, or a tensor is in one file only; 77: there "
                    "is nothing to compare.")
    parser.add_argument("a", metavar="A.h5")
    parser.add_argument("b", metavar="B.h5")
    parser.add_argument("--tolerance", type=float, metavar="X",
                        help="allowed error (by the narrowest type in either file: 1e-11, 2e-5, 2e-3 or 3e-3 for "
                             "float64, float32, float16, bfloat16)")
    parser.add_argument("--only", action="append", metavar="NAME",
                        help="compare only this tensor, named as outputs/out or out; may be given several times (all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="write a picture of the errors over heads and blocks (none)")
    parser.set_defaults(run=main)


def main(args):
    if args.tolerance is not None and not args.tolerance >= 0:
        raise InputError(f"--tolerance: expected a number of at least 0, got {args.tolerance}")
    if args.plot is not None:
        require_matplotlib()
    with ResultFile(args.a) as a, ResultFile(args.b) as b:
        both, only_a, only_b = _names(a, b, args.only)
        if not both:
            print(json.dumps({"a": args.a, "b": args.b, "pass": False, "tensors": []}) if args.json
                  else "nothing to compare: no tensor is in both files")
            return NOTHING_COMPARED
        cu_seqlens = b.cu_seqlens if b.cu_seqlens is not None else a.cu_seqlens
        tolerance = _default_tolerance(a, b, both) if args.tolerance is None else args.tolerance
        verdicts = [_verdict(a, b, name, tolerance, cu_seqlens, args.plot is not None) for name in both]
    verdicts += [Verdict(name, None, tolerance, f"absent in {args.b}") for name in only_a]
    verdicts += [Verdict(name, None, tolerance, f"absent in {args.a}") for name in only_b]
    judgement = Judgement(args.a, args.b, tier=f"tolerance {tolerance:.0e}", cu_seqlens=cu_seqlens,
                          verdicts=tuple(verdicts))
    written = [] if args.plot is None else _plot(args.plot, judgement)
    if args.json:
        print(json.dumps({"a": args.a, "b": args.b, "pass": judgement.passed,
                          "tensors": telling.tensors(judgement)}, indent=1))
    else:
        print("\n".join([telling.table(judgement), *(f"wrote {path}" for path in written)]))
    return PASS if judgement.passed else MISMATCH


def _names(a, b, chosen):
    """(in both, only in a, only in b), of these the chosen ones. Raises InputError for a name that neither has."""
    names = names_to_match(a, b)
    if chosen is None:
        return names
    known = [name for part in names for name in part]
    wanted = set()
    for name in chosen:
        found = [full for full in known if name in (full, full.rpartition("/")[2])]
        if not found:
            near = difflib.get_close_matches(name, known + [full.rpartition("/")[2] for full in known], n=1)
            raise InputError(f"--only: expected a tensor of either file, got {name}: "
                             + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"))
        wanted.update(found)
    return tuple([name for name in part if name in wanted] for part in names)


def _verdict(a, b, name, tolerance, cu_seqlens, with_blocks):
    if a.shape(name) != b.shape(name):
        return Verdict(name, None, tolerance, f"shape {a.shape(name)} against {b.shape(name)}")
    comparison = compare_tensor(a, b, name, cu_seqlens)
    blocks = blocks_of(name, comparison, lambda: (a.read(name), b.read(name))) if with_blocks else None
    return Verdict(name, comparison.result(), tolerance, None, None, blocks)


def _plot(path, judgement):
    try:
        return write_heat_map(path, [judgement])
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _default_tolerance(a, b, names):
    return max(tolerance_for(file.dtype(name)) for file in (a, b) for name in names)
