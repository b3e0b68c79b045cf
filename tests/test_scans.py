"""Scans under mpirun: every way across ranks gives one rank's tensors and sends what its closed formula says."""

import json

import numpy as np
import pytest
from launcher import TESTS, launch

from kda_engine.partition import partition
from mpi_runner.parallel.boundary import FORWARD, Crossings
from mpi_runner.parallel.rates import TYPICAL
from mpi_runner.parallel.routes import ROUTES
from mpi_runner.parallel.routes.choice import MOST_HELD, choose


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_scan_gives_what_one_rank_gives(ranks):
    done = launch(ranks, TESTS / "mpi" / "scans.py", timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"] == [] and result["compared"] > 1500 * ranks
    # Every route was walked; one message to each neighbour is refused where that is not enough.
    assert set(result["taken"]) == set(ROUTES)
    assert (result["refused"] > 0) == (ranks > 2)


def crossings(ranks, certified=False, HV=64, nodes=None):
    """One sequence over all ranks, head size 128, float32."""
    exact = Crossings.exact(FORWARD, partition(np.array([0, ranks * 16]), ranks), HV, 128, 128, 4, nodes)
    return Crossings(FORWARD, exact.segments, HV, 128, 128, 4, exact.kept & (not certified), nodes)


def test_certified_heads_take_one_message_whatever_the_ranks():
    S = crossings(2).state_bytes
    for ranks in (2, 8, 64):
        assert all(route.sent(crossings(ranks, certified=True)) == [S] * (ranks - 1) + [0] for route in ROUTES.values())
        assert choose(crossings(ranks, certified=True), TYPICAL)[0].name == "neighbour"


def test_memory_of_a_rank_is_flat_in_the_ranks_for_all_but_the_gather():
    nodes = lambda ranks: tuple(rank // 8 for rank in range(ranks))
    held = lambda route, ranks: max(route.held(crossings(ranks, nodes=nodes(ranks))))
    for name in set(ROUTES) - {"neighbour", "allgather"}:
        # `heads` gives a rank one head at least, so beyond as many ranks as heads it grows.
        few, many = held(ROUTES[name], 8), held(ROUTES[name], 64 if name == "heads" else 4096)
        assert many == few, name
    assert held(ROUTES["allgather"], 512) > 60 * held(ROUTES["allgather"], 8)


def test_auto_takes_what_the_model_finds_fastest():
    for ranks in (3, 8, 64, 512, 4096):
        nodes = tuple(rank // 8 for rank in range(ranks))
        one = crossings(ranks, nodes=nodes)
        route, reason = choose(one, TYPICAL)
        allowed = [r for r in ROUTES.values() if r.name not in ("serial", "neighbour") and max(r.held(one)) <= MOST_HELD]
        assert route.exchange_seconds(one, TYPICAL) == min(r.exchange_seconds(one, TYPICAL) for r in allowed), reason
    assert choose(crossings(4096), TYPICAL)[0].name != "allgather"
    assert max(ROUTES["allgather"].held(crossings(4096))) > MOST_HELD
