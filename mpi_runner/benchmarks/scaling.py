"""`bench scaling`: the distributed forward (and backward) of one problem over numbers of ranks."""

import numpy as np

from kda_engine.bench.problem import BOTH, FORWARD, Problem, passed, start_row
from kda_engine.bench.record import OURS, make_record
from kda_engine.bench.shapes import REGIMES, parse

from ..exit_codes import MISMATCH, PASS
from ..job import CHOICES
from .collectives import mpi_provenance
from .engine import DEFAULTS, add_outputs, check_common, finish, make_machine

SCANS = CHOICES["scan"][1:]


def add(modes):
    parser = modes.add_parser(
        "scaling", help="measure a distributed problem over numbers of ranks, under mpirun",
        description="Under mpirun: measures the same problem cut over 1, 2, 4 ... ranks, without reading or writing "
                    "files. Results are checked first. The time of a sample is the slowest rank's. A rank has the same "
                    "number of threads however many ranks take part. Exit code 1 when a check fails.")
    parser.add_argument("--engine", choices=tuple(DEFAULTS), default="numpy", help="who computes (numpy)")
    parser.add_argument("--shape", default="2048x16", metavar="S", help="as in `bench` (2048x16)")
    parser.add_argument("--regime", choices=tuple(REGIMES), default="weak", help="how fast the gate decays (weak)")
    parser.add_argument("--scan", nargs="+", choices=SCANS, default=list(SCANS),
                        help="scan strategies (all that can carry the problem)")
    parser.add_argument("--ranks", nargs="+", type=int, metavar="R",
                        help="how many of the ranks take part (powers of two up to all, and all)")
    parser.add_argument("--backward", action="store_true", help="time forward and backward")
    parser.add_argument("--tolerance", type=float, default=0.0, help="tolerance of the certified decay skip (0: exact)")
    parser.add_argument("--samples", type=int, default=30, help="samples of each case (30)")
    add_outputs(parser)
    parser.set_defaults(run=main)


def main(args):
    """Measure on all ranks, print and write on the first. Raises InputError."""
    check_common(args)
    parse(args.shape)
    # MPI starts with these imports; a wrong command line is told before.
    from ..session import Session
    from ..parallel.problem import UnsuitableScan
    from .distributed import DistributedCall
    from .ranks import count_nodes, on_first_ranks, rank_counts, slowest_seconds

    with Session() as session:
        counts = session.together(lambda: rank_counts(args.ranks, session.size, least=1))
        machine = session.together(lambda: _machine_of_rank(session, args.engine))
        problem = session.together(lambda: Problem(machine, args.shape, args.regime, args.tolerance))
        what, threads = BOTH if args.backward else FORWARD, session.threads()
        expected = problem.expected(what)

        def measure(transport):
            rows = []
            for scan in args.scan:
                call = DistributedCall(problem, what, transport, scan, threads)
                try:
                    mine = call.error(expected)
                except UnsuitableScan:
                    continue
                error = float(np.max(transport.control.collect(mine, "checking the results")))
                rows.append(start_row(problem, what, False, False, error))
                rows[-1]["case"] |= {"scan": scan, "transport": transport.name, "ranks": transport.size}
                if passed(rows[-1]):
                    rows[-1]["samples"] = {OURS: slowest_seconds(transport.control, call.run, args.samples)}
            return rows

        rows, nodes = on_first_ranks(session, counts, measure), count_nodes(session)
        if session.rank == 0:
            described = {**machine.describe(), "threads": threads, "nodes": nodes}
            finish(make_record("scaling", mpi_provenance(), described, None, rows), args)
        session.code = PASS if all(map(passed, rows)) else MISMATCH
    return session.code


def _machine_of_rank(session, engine):
    if engine == "cuda":
        # Says what is missing where there is no usable device, before one is asked for.
        make_machine(engine)
        session.use_device(oversubscribe=False)
    return make_machine(engine)
