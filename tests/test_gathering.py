"""Filling the output: slabs of any size make the same file, and a signal stops the work between two of them."""

import numpy as np
import pytest
from mpi4py import MPI

from kda_engine.arrays import BFLOAT16
from kda_engine.hdf5.results import ResultFile
from mpi_runner import gathering
from mpi_runner.gathering import Part, write_gathered, write_shards
from mpi_runner.parallel.control import Control
from mpi_runner.parallel.transports import HostTransport
from mpi_runner.session import Stopped

ROWS = 50


class Alone:
    """A session of one rank that is told to stop after so many looks."""

    rank = 0

    def __init__(self, looks=10**9):
        self.control, self.looks = Control(MPI.COMM_SELF), looks
        self.transport = HostTransport(self.control)

    def poll(self):
        self.looks -= 1
        if self.looks < 0:
            raise Stopped("stopped")

    def settle(self):
        self.poll()


def part():
    values = np.random.default_rng(0).standard_normal((ROWS, 2, 3)).astype("f4")
    return values, Part("outputs/out", values.shape, values.dtype, [(0, ROWS)], [values[:7], values[7:7], values[7:]])


@pytest.fixture(params=[write_gathered, write_shards])
def write(request, monkeypatch):
    monkeypatch.setattr(gathering, "SLAB_BYTES", 100)
    return request.param


def test_slabs_make_the_whole(tmp_path, write):
    values, one = part()
    write(Alone(), tmp_path / "out.h5", False, [one], lambda: ({}, {}))
    with ResultFile(tmp_path / "out.h5") as file:
        assert np.array_equal(file.read("outputs/out"), values)


@pytest.mark.parametrize("dtype", [BFLOAT16, "f2", "f4", "f8"], ids=str)
def test_values_that_are_not_finite_are_counted(tmp_path, write, dtype):
    """The part of the second of two ranks: its rows come after the other's 5."""
    values = np.random.default_rng(0).standard_normal((ROWS, 2, 3)).astype(dtype)
    values[0, 1, 2] = np.finfo("f2").max if dtype == "f2" else 3e38
    clean = Part("outputs/out", values.shape, values.dtype, [(0, ROWS)], [values])
    values = values.copy()
    values[40, 0, 1], values[31, 1, 2], values[31, 1, 0] = np.nan, -np.inf, np.inf
    spoilt = Part("grads/dv", (ROWS + 5, 2, 3), values.dtype, [(5, ROWS)], [values[:7], values[7:]])
    write(Alone(), tmp_path / "out.h5", False, [clean, spoilt], lambda: ({}, {}))
    assert (clean.not_finite.count, clean.not_finite.first) == (0, None)
    assert (spoilt.not_finite.count, spoilt.not_finite.first) == (3, (36, 1))


def test_a_signal_stops_the_writing(tmp_path, write):
    session = Alone(looks=3)
    with pytest.raises(Stopped):
        write(session, tmp_path / "out.h5", False, [part()[1]], lambda: pytest.fail("all was written"))
    assert list(tmp_path.iterdir()) == []
