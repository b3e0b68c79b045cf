"""`--shard heads` under mpirun: the same tensors as in one process, and nothing crosses ranks while they compute."""

import json

import pytest
from launcher import TESTS, launch, memory_folder

from kda_engine import InputError
from mpi_runner.__main__ import main
from mpi_runner.head_shards import heads_of_ranks, shares


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_heads_over_ranks_give_what_one_process_gives(ranks):
    with memory_folder() as folder:
        done = launch(ranks, TESTS / "mpi" / "head_shards.py", folder)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"] == [] and result["compared"] >= 20 and result["sent"] == 0


def test_shares_of_heads_and_rows():
    assert heads_of_ranks(5, 3) == [range(0, 1), range(1, 3), range(3, 5)]
    assert shares(5, 3) == [(0, 1), (1, 2), (3, 2)] and shares(0, 2) == [(0, 0), (0, 0)]
    with pytest.raises(InputError, match="at least one key head for each of the 3 ranks, got 2"):
        heads_of_ranks(2, 3)


def test_what_is_refused(tmp_path, capsys):
    assert main(["input", "--case", "ordinary", str(tmp_path / "in.h5")]) == 0
    run = lambda *more: main(["run", str(tmp_path / "in.h5"), str(tmp_path / "out.h5"), *more])
    assert run("--shard", "2x4") == 2 and "'2x4' is not built yet" in capsys.readouterr().err
    assert run("--shard", "rows") == 2 and "expected one of tokens, heads" in capsys.readouterr().err
    assert run("--shard", "heads", "--save-boundary") == 2 and "nothing crosses" in capsys.readouterr().err
    assert not (tmp_path / "out.h5").exists()
