"""The engine held against every golden, as `golden check --engine cuda` does."""

from pathlib import Path

import pytest

from mpi_runner.goldens.sources import OneProcess

FILES = sorted((Path(__file__).resolve().parents[2] / "data").glob("*.h5"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_engine_passes(path):
    judgement = OneProcess("cuda").judge(str(path), None)
    assert judgement.error is None and judgement.compared >= 8
    assert not [(verdict.name, verdict.difference) for verdict in judgement.verdicts if not verdict.passed]
