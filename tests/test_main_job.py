"""The main job under mpirun: every case, rank count, route and cut gives the oracle's results."""

import json
import pickle
from pathlib import Path

import pytest
from launcher import TESTS, launch, memory_folder
from oracle import run, upcast

from kda_engine import cases

RANKS = (1, 2, 3, 4, 7)


@pytest.fixture(scope="module")
def folder():
    with memory_folder() as name:
        folder = Path(name)
        expected = {case: run(upcast(cases.make(case)), "reference") for case in cases.names()}
        (folder / "expected.pickle").write_bytes(pickle.dumps(expected))
        yield folder


def result_of(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("sweep, runs", [("float64", 4), ("float32", 2)])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_case_equals_the_oracle(folder, ranks, sweep, runs):
    result = result_of(launch(ranks, TESTS / "mpi" / "all_cases.py", folder, sweep, timeout=600))
    assert result["failures"] == []
    # out, final_state and at least eight gradients of every run were compared.
    assert result["compared"] >= 9 * runs * len(cases.names())


@pytest.mark.parametrize("ranks", [2, 4])
def test_certified_skip_stays_within_the_bounds_it_reports(folder, ranks):
    result = result_of(launch(ranks, TESTS / "mpi" / "decay_skip.py", folder))
    assert result["failures"] == []
    assert result["looked_at"] > 100
    for name in ("strong", "heads-differ"):
        assert result["dropped"][name] > 0, f"{name}: nothing was dropped, so nothing was shown"
    for name in ("relay", "alternating", "alternating-reflecting", "weak", "repeat"):
        assert result["fallbacks"][name], name
