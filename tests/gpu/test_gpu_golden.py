"""The engine held against every golden, as `golden check --engine cuda` does."""

from pathlib import Path

import pytest
from launcher import launch

from mpi_runner.goldens.sources import OneProcess

DATA = Path(__file__).resolve().parents[2] / "data"
FLOAT64 = sorted(DATA.glob("*-float64.h5"))
FILES = sorted(set(DATA.glob("*.h5")) - set(FLOAT64))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_engine_passes(path):
    judgement = OneProcess("cuda").judge(str(path), None)
    assert judgement.error is None and judgement.refused is None and judgement.compared >= 8
    assert not [(verdict.name, verdict.difference) for verdict in judgement.verdicts if not verdict.passed]


@pytest.mark.parametrize("path", FLOAT64, ids=lambda path: path.stem)
def test_float64_is_refused(path):
    judgement = OneProcess("cuda").judge(str(path), None)
    assert "float64" in judgement.refused and not judgement.verdicts


def test_as_the_main_job_does_it():
    """Under the launcher: on one rank, for which any machine has a device."""
    done = launch(1, "-m", "mpi_runner", "golden", "check", "--engine", "cuda", FLOAT64[0], DATA / "conv-bfloat16.h5")
    assert done.returncode == 0, done.stderr
    assert "not compared: engine: expected no float64" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 of 2 goldens pass, 1 were not compared"
