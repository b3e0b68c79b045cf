"""`compare`: two result files, tensor by tensor."""

from kda_engine.compare import tolerance_for
from kda_engine.errors import InputError
from kda_engine.hdf5.matching import names_to_match, tensor_difference
from kda_engine.hdf5.results import ResultFile

from ..difference_table import failure_row, render, table_row
from ..exit_codes import MISMATCH, NOTHING_COMPARED, PASS


def add(subparsers):
    parser = subparsers.add_parser(
        "compare", help="two outputs, tensor by tensor",
        description="Relative Frobenius error of every tensor of A against B (outputs or goldens). Exit code 0: all "
                    "within the tolerance; 1: some are not, or a tensor is in one file only; 77: nothing to compare.")
    parser.add_argument("a", metavar="A.h5")
    parser.add_argument("b", metavar="B.h5")
    parser.add_argument("--tolerance", type=float, metavar="X",
                        help="allowed error (by the narrowest type in either file: 1e-11, 2e-5, 2e-3 or 3e-3 for "
                             "float64, float32, float16, bfloat16)")
    parser.set_defaults(run=main)


def main(args):
    if args.tolerance is not None and not args.tolerance >= 0:
        raise InputError(f"--tolerance: expected a number of at least 0, got {args.tolerance}")
    with ResultFile(args.a) as a, ResultFile(args.b) as b:
        both, only_a, only_b = names_to_match(a, b)
        if not both:
            print("nothing to compare: no tensor is in both files")
            return NOTHING_COMPARED
        cu_seqlens = b.cu_seqlens if b.cu_seqlens is not None else a.cu_seqlens
        tolerance = _default_tolerance(a, b, both) if args.tolerance is None else args.tolerance
        rows = [_row(a, b, name, tolerance, cu_seqlens) for name in both]
    rows += [failure_row(name, f"absent in {args.b}") for name in only_a]
    rows += [failure_row(name, f"absent in {args.a}") for name in only_b]
    print(render(rows))
    return PASS if all(row[-1] == "ok" for row in rows) else MISMATCH


def _row(a, b, name, tolerance, cu_seqlens):
    if a.shape(name) != b.shape(name):
        return failure_row(name, f"shape {a.shape(name)} against {b.shape(name)}")
    return table_row(name, tensor_difference(a, b, name, cu_seqlens), tolerance, cu_seqlens)


def _default_tolerance(a, b, names):
    return max(tolerance_for(file.dtype(name)) for file in (a, b) for name in names)
