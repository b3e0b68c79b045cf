"""How the CUDA engine cuts a problem into slabs: every token once, on the chunk grid of its sequence; nothing changes."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy")

from kda_engine import cases, layout  # noqa: E402
from kda_engine.engines.base import Saved  # noqa: E402
from kda_engine.engines.cuda import slabs  # noqa: E402
from kda_engine.engines.cuda.paths import Path  # noqa: E402
from kda_engine.engines.cuda.slabs import cut_slabs  # noqa: E402
from kda_engine.engines.reference import ReferenceEngine  # noqa: E402
from kda_engine.layout import CHUNK  # noqa: E402

PROBLEMS = [(70,), (33, 16, 48, 5), (0, 20, 17), (20, 0, 17), (20, 17, 0), (0, 0, 16, 0, 0, 0, 31, 1, 0, 0),
            (1, 7, 16, 2, 40, 0, 3, 15, 17, 1, 1, 29)]


@pytest.mark.parametrize("chunks", (1, 2, 3, 1000))
@pytest.mark.parametrize("lengths", PROBLEMS)
def test_slabs_hold_every_token_once(lengths, chunks):
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    found = cut_slabs(cu_seqlens, chunks)
    assert found[0].tokens.start == 0 and found[-1].tokens.stop == cu_seqlens[-1]
    for before, after in zip(found, found[1:]):
        assert before.tokens.stop == after.tokens.start
    for slab in found:
        here = slab.cu_seqlens + slab.tokens.start
        assert len(here) == slab.sequences.stop - slab.sequences.start + 1
        assert np.sum(-(-np.diff(here) // CHUNK)) <= chunks
        starts = cu_seqlens[slab.sequences]
        stops = cu_seqlens[slab.sequences.start + 1 : slab.sequences.stop + 1]
        # A piece starts on its sequence's grid, and only the sequence's end is off it.
        assert np.all((here[:-1] >= starts) & ((here[:-1] - starts) % CHUNK == 0))
        assert np.all((here[1:] == stops) | ((here[1:] - starts) % CHUNK == 0))


@pytest.mark.parametrize("lengths", ((), (0,), (0, 0, 0)))
def test_no_token_no_slab(lengths):
    assert cut_slabs(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), 4) == []


class Problem:
    """Of NumPy arrays, on a device with that much memory."""

    def __init__(self, operands, options, device):
        self.operands, self.options, self.device, self.v = operands, options, device, operands.v
        self.target = device
        self.most_chunks = operands.tokens // CHUNK + operands.sequences

    def empty_like_values(self):
        return np.full(self.v.shape, np.nan)

    def empty_states(self):
        return np.full(self.operands.state_shape, np.nan)


class Definition(Path):
    """The recurrence itself as a path whose records take a byte a chunk; `longest`: chunks that it was asked for."""

    name, engine = "definition", ReferenceEngine()

    def __init__(self, chunks=None):
        self.chunks, self.longest, self.calls = chunks, 0, []

    def forward_bytes(self, problem, save):
        return problem.most_chunks if save else 0

    def summary_bytes(self, problem):
        return problem.most_chunks

    def backward_chunks(self, operands):
        return self.chunks

    def forward(self, problem, initial_state, save, out, final_state):
        self._note("forward", problem)
        found = self.engine.forward(problem.operands, problem.options, self._states(problem, initial_state), True)
        out[...], final_state[...] = found.out, found.final_state
        return found.saved if save else None, None

    def summarise(self, problem, initial_state, transition):
        self._note("summarise", problem)
        return self.engine.summarise(problem.operands, problem.options, initial_state, transition)

    def summarise_backward(self, problem, d_out, d_final_state):
        self._note("summarise_backward", problem)
        return self.engine.summarise_backward(problem.operands, problem.options, d_out, d_final_state)

    def backward(self, problem, record, entering, d_out, d_leaving, gradients):
        self._note("backward", problem)
        saved = record
        if saved is None:
            saved = self.engine.forward(problem.operands, problem.options, entering, True).saved
        found = self.engine.backward(saved, d_out, d_leaving)
        for name, x in gradients.items():
            x[...] = getattr(found, name)
        return found.d_initial_state, found.dA_log, found.ddt_bias, None

    def _note(self, stage, problem):
        self.calls.append(stage)
        self.longest = max(self.longest, int(np.sum(-(-np.diff(problem.operands.cu_seqlens) // CHUNK))))

    @staticmethod
    def _states(problem, initial_state):
        return np.zeros(problem.operands.state_shape) if initial_state is None else initial_state


@pytest.fixture
def on_the_host(monkeypatch):
    """Slabs of NumPy arrays."""
    monkeypatch.setattr(slabs, "cupy", np)
    monkeypatch.setattr(slabs, "take_problem", Problem)
    monkeypatch.setattr(slabs, "contiguous", lambda x, dtype: np.ascontiguousarray(x, dtype))


def drawn(lengths, states):
    """(operands, options, initial states or None, d_out, d_final_state) in float64."""
    case = cases.make("packed", dtype="float64", heads=1, value_heads=2, K=3, V=2, lengths=lengths)
    operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.cu_seqlens,
                              case.options.gate, case.initial_state)
    return operands, case.options, case.initial_state if states else None, case.d_out, case.d_final_state


def stages(path, memory, operands, options, initial, d_out, d_final):
    """Everything that the engine hands out, by name."""
    device, poll = SimpleNamespace(memory=memory), lambda: None
    problem = Problem(operands, options, device)
    out, final_state, kept, _ = slabs.forward(path, operands, problem, initial, True, poll)
    gradients, _ = slabs.backward(Saved(operands, options, initial, kept), d_out, d_final, device, poll)
    zeros = np.zeros(operands.state_shape)
    pair = slabs.summarise(path, operands, problem, zeros if initial is None else initial, True, poll)
    D = slabs.summarise_backward(path, operands, options, d_out, d_final, device, poll)
    return {"out": out, "final_state": final_state, "M": pair.M, "S": pair.S, "D": D, **vars(gradients)}, kept


@pytest.mark.parametrize("states", (False, True))
@pytest.mark.parametrize("lengths", PROBLEMS)
def test_slabs_change_nothing(lengths, states, on_the_host, monkeypatch):
    """Slab ends in the middle of sequences, sequences without tokens, initial and final states."""
    given = drawn(lengths, states)
    chunks = sum(-(-n // CHUNK) for n in lengths)
    path = Definition()
    expected, kept = stages(path, 1e9, *given)
    assert kept.slabs is None and kept.record is not None and path.longest == chunks
    monkeypatch.setattr(slabs, "WHOLE", 0.0)
    for memory, of_backward in ((1.0, 1), (2 * chunks / slabs.SLAB / 3, 2)):
        path = Definition(of_backward)
        found, kept = stages(path, memory, *given)
        assert kept.record is None and len(kept.slabs) == len(kept.entering) > 1 or chunks == 1
        assert path.longest < chunks or chunks == 1
        for name, x in expected.items():
            assert np.allclose(found[name], x, rtol=1e-12, atol=1e-12), name


def test_a_forward_that_kept_no_states_is_gone_through_again(on_the_host):
    """As of a path whose backward needs its inputs alone."""
    given = drawn((70, 0, 33), True)
    expected, _ = stages(Definition(), 1e9, *given)
    path = Definition(2)
    operands, options, initial, d_out, d_final = given
    found, _ = slabs.backward(Saved(operands, options, initial, slabs.Kept(path)), d_out, d_final,
                           SimpleNamespace(memory=1e9), lambda: None)
    assert path.calls.count("summarise") == path.calls.count("backward") - 1 == 3 and path.longest == 2
    for name, x in vars(found).items():
        assert np.allclose(x, expected[name], rtol=1e-12, atol=1e-12), name


def test_work_is_polled_for_between_slabs(on_the_host, monkeypatch):
    monkeypatch.setattr(slabs, "WHOLE", 0.0)
    operands, options, initial, *_ = drawn((100,), True)
    seen = []
    problem = Problem(operands, options, SimpleNamespace(memory=1.0))
    slabs.forward(Definition(), operands, problem, initial, True, lambda: seen.append(1))
    assert len(seen) == 7
