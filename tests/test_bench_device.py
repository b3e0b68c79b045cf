"""`bench` on a device, tiny shapes: checks, stages, kernels one by one, graphs; no time is judged."""

import pytest

from kda_engine.bench.record import CONTROL, OURS, read_record
from kda_engine.engines import cuda_usable
from mpi_runner.__main__ import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_usable(), reason="no usable CUDA device")]


def rows_of(path, *arguments):
    assert main(["bench", *map(str, arguments), "--samples", "3", "--output", str(path)]) == 0
    return read_record(path)["rows"]


@pytest.mark.parametrize("regime", ["strong", "weak"])
def test_forward_backward_stages_and_kernels(tmp_path, regime):
    rows = rows_of(tmp_path / "record.json", "--engine", "cuda", "--shape", "64x2", "2x40x2", "--regime", regime,
                   "--backward", "--stages", "--peers")
    assert len(rows) == 2 * (2 + 4)
    for row in rows:
        assert len(row["samples"][OURS]) == len(row["samples"][CONTROL]) == 3 and min(row["samples"][OURS]) > 0
        if "kernels" in row:
            assert row["kernels"] and row["host_seconds"] > 0
            assert all(len(taken) == 3 and min(taken) > 0 for taken in row["kernels"].values())


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_a_replayed_graph(tmp_path, cache):
    row, = rows_of(tmp_path / "record.json", "--engine", "cuda", "--shape", "64x2", "--regime", "weak", "--graph",
                   "--cache", cache, "--peers")
    assert row["case"]["launch"] == "graph" and len(row["samples"][OURS]) == 3


def test_scaling_on_one_rank(tmp_path):
    rows = rows_of(tmp_path / "record.json", "scaling", "--engine", "cuda", "--shape", "64x2", "--backward")
    assert [row["case"]["ranks"] for row in rows] == [1, 1] and all("samples" in row for row in rows)
