"""`ForwardResult.chunk_states`: the state behind every block, held to forwards of the tokens before it."""

from dataclasses import replace

import numpy as np
import pytest
from oracle import arguments

import kda_engine as kda
from kda_engine import cases


def forward(case, engine, **changed):
    given, options = arguments(case)
    return kda.forward(*given, **(options | changed), engine=engine)


def cut(case, n, start, stop, state):
    """The tokens [start, stop) of sequence n as a problem of their own, from `state`."""
    first = case.cu_seqlens[n] if case.cu_seqlens is not None else 0
    rows = slice(int(first) + start, int(first) + stop)
    tokens = {name: getattr(case, name)[rows] for name in ("q", "k", "v", "g", "beta")}
    return replace(case, cu_seqlens=None, initial_state=state, **tokens)


@pytest.mark.parametrize("engine", ["numpy", "reference"])
@pytest.mark.parametrize("name, every", [("ordinary", 16), ("ragged", 1), ("ragged", 5), ("grouped-heads", 32), ("VK", 8),
                                         ("empty-runs", 16), ("no-states", 10), ("resets", 20)])
def test_states_are_those_of_the_tokens_before(name, every, engine):
    case = cases.make(name, dtype="f8")
    found = forward(case, engine).chunk_states(every)
    lengths = case.lengths
    assert found.sequence.tolist() == [n for n, length in enumerate(lengths) for _ in range(length // every)]
    assert found.token.tolist() == [every * (i + 1) for length in lengths for i in range(length // every)]
    for n, token, state in zip(found.sequence, found.token, found.states):
        initial = None if case.initial_state is None else case.initial_state[n : n + 1]
        whole = forward(cut(case, n, 0, int(token), initial), engine)
        assert kda.compare(state[None], whole.final_state) <= 1e-11


@pytest.mark.parametrize("name", ["ragged", "VK"])
def test_a_forward_goes_on_from_a_state(name):
    case = cases.make(name, dtype="f8")
    fwd = forward(case, "numpy")
    found = fwd.chunk_states(7)
    bounds = np.concatenate([[0], np.cumsum(case.lengths)])
    for n, token, state in zip(found.sequence, found.token, found.states):
        rest = forward(cut(case, n, int(token), case.lengths[n], state[None]), "numpy")
        assert kda.compare(rest.out, fwd.out[bounds[n] + token : bounds[n + 1]]) <= 1e-11
        assert kda.compare(rest.final_state, fwd.final_state[n : n + 1]) <= 1e-11


def test_a_batch_in_float32():
    case = cases.make("ordinary", tokens=64)
    batch = lambda x: np.stack([x, x[::-1]])
    fwd = kda.forward(batch(case.q), batch(case.k), batch(case.v), batch(case.g), batch(case.beta), engine="numpy")
    found = fwd.chunk_states(np.int64(64))
    assert found.states.dtype == np.float32 and found.token.tolist() == [64, 64]
    assert kda.compare(found.states, fwd.final_state) <= 2e-6


def test_no_whole_block():
    found = forward(cases.make("packed"), "numpy").chunk_states(1000)
    assert len(found.states) == len(found.sequence) == len(found.token) == 0 and found.states.ndim == 4
    none = forward(cases.make("empty-all"), "numpy").chunk_states(16)
    assert len(none.states) == 0


@pytest.mark.parametrize("every", [0, -16, 16.0, True, None])
def test_every_is_a_number_of_tokens(every):
    with pytest.raises(kda.InputError, match="^every: expected a whole number of tokens, at least 1, got "):
        forward(cases.make("ordinary"), "numpy").chunk_states(every)


def test_it_needs_what_a_forward_keeps():
    with pytest.raises(kda.InputError, match="^chunk_states: expected a forward with save=True"):
        forward(cases.make("ordinary"), "numpy", save=False).chunk_states(16)
