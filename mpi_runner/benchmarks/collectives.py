"""`bench collectives`: what crosses ranks in a run, by strategy, transport, number of ranks and message size."""

from kda_engine.bench.problem import passed
from kda_engine.bench.record import make_record
from kda_engine.errors import InputError

from ..environment import cpu_model, mpi_version
from ..exit_codes import MISMATCH, PASS
from ..provenance import provenance
from .engine import add_outputs, check_common, finish

PACKAGES = ("numpy", "mpi4py", "mpich", "openmpi")


def add(modes):
    parser = modes.add_parser(
        "collectives", help="measure the transfers between ranks, under mpirun",
        description="Under mpirun: measures the boundary exchange of one sequence over all ranks by each scan "
                    "strategy, and the sum of the parameter gradients, head size 128, float32. Results are checked first. "
                    "The time of a sample is the slowest rank's. Exit code 1 when a check fails.")
    parser.add_argument("--heads", nargs="+", type=int, default=[4, 16, 64], metavar="HV",
                        help="value heads: the message sizes (4 16 64)")
    parser.add_argument("--ranks", nargs="+", type=int, metavar="R",
                        help="how many of the ranks take part (powers of two up to all, and all)")
    parser.add_argument("--samples", type=int, default=30, help="samples of each case (30)")
    add_outputs(parser)
    parser.set_defaults(run=main)


def main(args):
    """Measure on all ranks, print and write on the first. Raises InputError."""
    check_common(args)
    if min(args.heads) < 1:
        raise InputError(f"heads: expected at least 1, got {min(args.heads)}")
    # MPI starts with these imports; a wrong command line is told before.
    from ..session import AgreedError, Session
    from .exchanges import measure_exchanges
    from .ranks import count_nodes, on_first_ranks, rank_counts

    with Session() as session:
        if session.size < 2:
            raise AgreedError("ranks: expected at least 2, got 1; mpirun -n R kda-engine bench collectives")
        counts = session.together(lambda: rank_counts(args.ranks, session.size, least=2))
        measure = lambda transport: measure_exchanges(transport, args.heads, args.samples)
        rows = on_first_ranks(session, counts, measure)
        nodes = count_nodes(session)
        if session.rank == 0:
            machine = {"name": cpu_model(), "nodes": nodes}
            finish(make_record("collectives", mpi_provenance(), machine, None, rows), args)
        session.code = PASS if all(map(passed, rows)) else MISMATCH
    return session.code


def mpi_provenance():
    """Who measures, with the MPI library."""
    return {**provenance(PACKAGES), "mpi": mpi_version()}
