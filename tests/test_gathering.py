"""Filling the output: slabs of any size make the same file, and a signal stops the work between two of them."""

import numpy as np
import pytest
from mpi4py import MPI

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


def test_a_signal_stops_the_writing(tmp_path, write):
    session = Alone(looks=3)
    with pytest.raises(Stopped):
        write(session, tmp_path / "out.h5", False, [part()[1]], lambda: pytest.fail("all was written"))
    assert list(tmp_path.iterdir()) == []
