"""`bench`: an engine's speed over shapes, gate regimes and directions."""

import sys
from itertools import product
from pathlib import Path

from kda_engine.bench.engine import Setting, measure_problem
from kda_engine.bench.host import TARGET_RATE, TARGET_SECONDS, Host
from kda_engine.bench.plots import require_matplotlib, write_plots
from kda_engine.bench.problem import BOTH, FORWARD, Problem, passed
from kda_engine.bench.record import make_record, write_csv, write_record
from kda_engine.bench.shapes import REGIMES, SHAPES, parse
from kda_engine.bench.table import markdown
from kda_engine.engines import make_engine
from kda_engine.errors import InputError
from kda_engine.options import GATES
from kda_engine.regular_file import check_regular

from ..environment import cpu_model
from ..exit_codes import MISMATCH, PASS
from ..launched import launched_rank
from ..provenance import provenance
from .share import parse_share

# What is measured when nothing is said: the shape that the NumPy engine's target is set on; every shape of the GPU's.
DEFAULTS = {"numpy": (("2048x16",), ("strong",)), "cuda": (tuple(SHAPES), tuple(REGIMES))}

PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x")


def add_options(parser):
    shapes = parser.add_argument_group("what is measured")
    shapes.add_argument("--engine", choices=tuple(DEFAULTS), default="numpy", help="who computes (numpy)")
    shapes.add_argument("--shape", nargs="+", metavar="S", default=[],
                        help="letters A to L, TxH (tokens x heads of size 128) or NxTxH (sequences of T tokens each)")
    shapes.add_argument("--shape-file", metavar="FILE",
                        help="more shapes from a file: one a line, # begins a comment (none)")
    shapes.add_argument("--tokens", nargs="+", type=int, metavar="T", help="a sweep: every T with every H and N (none)")
    shapes.add_argument("--heads", nargs="+", type=int, metavar="H", help="heads of the sweep (16)")
    shapes.add_argument("--sequences", nargs="+", type=int, metavar="N", help="sequences of T tokens of the sweep (1)")
    shapes.add_argument("--regime", nargs="+", choices=tuple(REGIMES),
                        help="how fast the gate decays (numpy: strong; cuda: all)")
    shapes.add_argument("--gate", nargs="+", choices=GATES, default=["lower_bound"], help="gate's form (lower_bound)")
    shapes.add_argument("--backward", action="store_true", help="also time forward and backward together")
    shapes.add_argument("--stages", action="store_true", help="also time the engine's stages and kernels one by one")
    shapes.add_argument("--tolerance", type=float, default=0.0, help="tolerance of the certified decay skip (0: exact)")
    how = parser.add_argument_group("how")
    how.add_argument("--samples", type=int, default=30, help="samples of each case (30)")
    how.add_argument("--until", metavar="X", help="take more samples, up to 10 times as many, until the median is certain to "
                     "that share of itself, with 95 %% confidence (take no more)")
    how.add_argument("--cache", choices=("cold", "warm"), default="cold", help="cache before each sample (cold)")
    how.add_argument("--graph", action="store_true", help="cuda: replay the forward's kernels as a CUDA graph")
    how.add_argument("--peers", nargs="*", metavar="P", help="cuda: peers to time too (all that are installed)")
    add_outputs(parser)
    parser.set_defaults(run=main)


def add_outputs(parser):
    """The options of every mode that makes a record."""
    where = parser.add_argument_group("results beside the printed page")
    where.add_argument("--output", metavar="RECORD.json", help="write every sample, for `bench compare` (none)")
    where.add_argument("--csv", metavar="SAMPLES.csv", help="write every sample as a row, for spreadsheets (none)")
    where.add_argument("--plot", metavar="FOLDER", help="draw pictures; needs matplotlib (none)")


def main(args):
    """Measure, print, write. Raises InputError."""
    names, regimes = shape_names(args), args.regime or DEFAULTS[args.engine][1]
    check_common(args)
    if args.graph and args.backward:
        raise InputError("graph: expected the forward alone, got --backward too")
    if launched_rank() > 0:
        # Several at once would only disturb each other.
        return PASS
    machine = make_machine(args.engine)
    peers = machine.peers() if args.peers is None else args.peers
    for name in peers:
        if name not in machine.peers():
            raise InputError(f"peers: expected some of {', '.join(machine.peers()) or 'none'}, got {name!r}")
    until = None if args.until is None else parse_share("until", args.until)
    setting = Setting(args.samples, until, args.cache == "cold", args.graph, tuple(peers), args.stages)
    ceilings = {"bandwidth": machine.bandwidth(), "matrix_rate": machine.matrix_rate()}
    rows = []
    for name, regime, gate in product(names, regimes, args.gate):
        print(f"kda-engine: measuring {name} {regime} {gate}", file=sys.stderr, flush=True)
        problem = Problem(machine, name, regime, args.tolerance, gate)
        rows += measure_problem(problem, (FORWARD, BOTH) if args.backward else (FORWARD,), setting)
    record = make_record("engine", provenance(PACKAGES), machine.describe(), ceilings, rows)
    finish(record, args)
    if args.engine == "numpy" and "2048x16" in names:
        print(f"\ntarget for the forward of 2048x16 at this matrix rate: "
              f"{1e3 * TARGET_SECONDS * TARGET_RATE / ceilings['matrix_rate']:.4g} ms")
    return PASS if all(map(passed, rows)) else MISMATCH


def shape_names(args):
    """The shapes that the options ask for, by name. Raises InputError."""
    names = list(args.shape) + ([] if args.shape_file is None else _read_shapes(args.shape_file))
    if args.tokens:
        names += ["x".join(map(str, (*([N] if N != 1 else []), T, H)))
                  for T, H, N in product(args.tokens, args.heads or [16], args.sequences or [1])]
    elif args.heads or args.sequences:
        raise InputError("tokens: expected --tokens beside --heads or --sequences")
    for name in names:
        parse(name)
    return names or DEFAULTS[args.engine][0]


def _read_shapes(path):
    check_regular(path, "a file of shapes")
    try:
        with open(path) as file:
            lines = [line.split("#")[0].strip() for line in file]
    except (OSError, ValueError) as error:
        raise InputError(f"shape_file: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    names = [line for line in lines if line]
    if not names:
        raise InputError(f"shape_file: expected a shape a line in {path}, got none")
    return names


def check_common(args):
    """The options of every mode that measures. Raises InputError before work is lost to it."""
    if args.samples < 2:
        raise InputError(f"samples: expected at least 2, got {args.samples}")
    if args.output is not None and not Path(args.output).absolute().parent.is_dir():
        raise InputError(f"output: expected a name in a folder that exists, got {args.output}")
    if args.csv is not None and not Path(args.csv).absolute().parent.is_dir():
        raise InputError(f"csv: expected a name in a folder that exists, got {args.csv}")
    if args.plot is not None:
        require_matplotlib()


def finish(record, args):
    """Print the page and write what else was asked for."""
    print(markdown(record))
    if args.output is not None:
        write_record(args.output, record)
    if args.csv is not None:
        write_csv(args.csv, record)
    if args.plot is not None:
        for path in write_plots(record, args.plot):
            print(f"kda-engine: wrote {path}", file=sys.stderr)


def make_machine(engine):
    """Where an engine is measured: a `Host` or a `Device`. Raises InputError where it cannot run."""
    if engine == "numpy":
        return Host(cpu_model())
    # Raises, saying what is missing, where there is no usable device.
    make_engine(engine)
    from kda_engine.bench.device import Device

    return Device()
