"""The engine as MPI sees it. Needs no GPU."""

from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from fake_device import fake_device  # noqa: E402

from kda_engine.engines.base import Forward  # noqa: E402
from mpi_runner.parallel.staged import StagedEngine  # noqa: E402


def test_transfers_move_on_while_a_device_works(monkeypatch):
    polls, asked = [], []

    class Event:
        """Done once it has been polled three times."""

        def __init__(self, disable_timing):
            self.recorded = False

        def record(self):
            self.recorded = True

        @property
        def done(self):
            assert self.recorded
            return len(polls) == 3

    class OnDevice:
        """An array whose copy is under way when `get` returns."""

        shape, dtype = (1, 2), np.dtype("f4")

        def get(self, out, blocking):
            assert not blocking and not polls
            out[...] = 5

    def buffer(name, shape, dtype, allocate):
        asked.append(name)
        return np.empty(shape, dtype)

    monkeypatch.setattr(cupy.cuda, "Event", Event)
    monkeypatch.setattr("mpi_runner.parallel.staged.array_module", lambda x: cupy)
    engine = SimpleNamespace(measure=None, poll=lambda: polls.append(1), take_array=lambda x: x,
                             forward=lambda *given: Forward("out", OnDevice(), None))
    with fake_device():
        result = StagedEngine(engine, buffer).forward(None, None, None, False)
    assert result.out == "out" and result.final_state.tolist() == [[5, 5]]
    assert len(polls) == 3 and asked == ["staged final_state"]


def test_states_of_the_host_are_handed_on():
    state = np.zeros(3)
    engine = SimpleNamespace(measure=None, poll=lambda: pytest.fail("nothing to wait for"), take_array=lambda x: x,
                             forward=lambda *given: Forward("out", state, None))
    staged = StagedEngine(engine, lambda *given: pytest.fail("no copy is made"))
    assert staged.forward(None, None, None, False).final_state is state
