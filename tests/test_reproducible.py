"""`--reproducible` under mpirun: the same bits at every number of ranks and threads, cut and scan."""

import json

import pytest
from launcher import TESTS, launch, memory_folder

from kda_engine import InputError
from mpi_runner.job import Job
from mpi_runner.parallel.folding import LONGEST, MOST_PIECES, SHORTEST, cut, piece_length


def digests(ranks, threads):
    with memory_folder() as folder:
        done = launch(ranks, TESTS / "mpi" / "reproducible.py", folder, environment={"OMP_NUM_THREADS": str(threads)},
                      timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"] == [] and result["differing"] == []
    return result["digests"]


def test_bits_do_not_depend_on_ranks_threads_cuts_and_scans():
    first = digests(1, 1)
    assert len(first) > 30
    for ranks, threads in ((2, 2), (3, 1), (4, 1)):
        assert digests(ranks, threads) == first, (ranks, threads)


def test_pieces_depend_on_the_whole_problem_alone():
    assert piece_length(0) == piece_length(MOST_PIECES * SHORTEST) == SHORTEST
    assert piece_length(MOST_PIECES * SHORTEST + 1) == 2 * SHORTEST and piece_length(10**9) == LONGEST
    assert cut([0, 0, 70, 96], 32) == [[], [(0, 32), (32, 64), (64, 70)], [(70, 96)]]


@pytest.mark.parametrize("more, text", [
    ({"scan": "heads"}, "expected scan auto, chain or serial"), ({"engine": "cuda"}, "expected engine auto, numpy or"),
    ({"shard": "heads"}, "expected shard tokens beside it"), ({"tolerance": 1e-6}, "expected decay skip exact")])
def test_what_it_does_not_go_with(more, text):
    with pytest.raises(InputError, match=text):
        Job.resolve({"input": "a.h5", "output": "b.h5", "reproducible": True, **more}, None)
