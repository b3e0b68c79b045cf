"""The engine as MPI sees it. Needs no GPU."""

from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from fake_device import fake_device  # noqa: E402

from kda_engine.engines.base import Forward  # noqa: E402
from mpi_runner import staged  # noqa: E402


def test_transfers_move_on_while_a_device_works(monkeypatch):
    polls = []

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

    monkeypatch.setattr(cupy.cuda, "Event", Event)
    monkeypatch.setattr(staged, "to_host", lambda x: (len(polls), x))
    with fake_device() as device:
        state = device.array((1, 2), "f4")
        engine = SimpleNamespace(measure=None, poll=lambda: polls.append(1), take_array=lambda x: x,
                                 forward=lambda *given: Forward("out", state, None))
        result = staged.StagedEngine(engine).forward(None, None, None, False)
    assert result.out == "out" and result.final_state[0] == 3 and result.final_state[1] is state


def test_states_of_the_host_are_handed_on():
    state = np.zeros(3)
    engine = SimpleNamespace(measure=None, poll=lambda: pytest.fail("nothing to wait for"), take_array=lambda x: x,
                             forward=lambda *given: Forward("out", state, None))
    assert staged.StagedEngine(engine).forward(None, None, None, False).final_state is state
