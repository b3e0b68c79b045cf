"""`kda.distributed` under mpirun: the same tensors as on one rank, from each rank's own arrays."""

import json

import pytest
from launcher import TESTS, launch


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_own_arrays_give_what_one_rank_gives(ranks):
    done = launch(ranks, TESTS / "mpi" / "own_arrays.py")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"] == [] and result["compared"] > 200
    refused = result["refused"]
    # Every rank is told the same.
    assert all(row == refused[0] for row in refused)
    told = refused[0]
    assert "v" in told["shape"] and f"rank {ranks - 1}" in told["shape"]
    assert "initial_state: expected shape" in told["state"] and "scan: expected auto" in told["scan"]
    assert "save=True" in told["save"]
    if ranks > 1:
        assert "cuts: expected multiples of 16" in told["grid"] and "options: expected the same" in told["options"]
