"""Scans over boundary pairs, on the worked example of docs/operator.md."""

import numpy as np
import pytest

import kda_engine as kda
from kda_engine.affine import Affine
from kda_engine.scan import prefix, suffix

M, S, D = (0.5, 0.4, 0.3), (2.0, 1.0, 3.0), (0.3, 0.5, 0.7)


def pairs(transitions, data):
    return [Affine(np.full((1, 1), m), np.full((1, 1), s)) for m, s in zip(transitions, data)]


def test_worked_example_forward():
    states = prefix(pairs(M, S), np.ones((1, 1)))
    assert np.allclose(np.ravel(states), [2.5, 2.0, 3.6], rtol=1e-15)


def test_worked_example_backward():
    gradients = suffix(pairs(M, D), np.ones((1, 1)))
    assert np.allclose(np.ravel(gradients), [0.75, 0.9, 1.0], rtol=1e-15)


def test_worked_example_from_state_zero():
    """docs/decomposition.md: from state 0 forward, from gradient 1 backward; every boundary."""
    states = [0.0, *np.ravel(prefix(pairs(M, S), np.zeros((1, 1))))]
    gradients = [*np.ravel(suffix(pairs(M, D), np.ones((1, 1)))), 1.0]
    assert np.allclose(states, [0, 2, 1.8, 3.54], rtol=1e-15)
    assert np.allclose(gradients[::-1], [1, 1, 0.9, 0.75], rtol=1e-15)


@pytest.mark.parametrize("engine", ["reference", "numpy"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_worked_example_by_engines(engine, ranks):
    """The same from tokens, one a rank: what stands at every boundary, with the tokens on so many ranks."""
    column = lambda x: np.array(x, "f8").reshape(-1, 1, 1)
    q, k, v, g = column([0.3 / 0.5, 0.5 / 0.4, 0.7 / 0.3]), column([1, 1, 1]), column([4, 2, 6]), column([1, 0.8, 0.6])
    beta, ones = np.full((3, 1), 0.5), np.ones((1, 1, 1, 1))
    options = kda.Options(gate="log", beta="value", qk_l2norm=False, scale=1.0)
    cuts = [*range(ranks), 3]
    state, forwards = 0 * ones, []
    for start, stop in zip(cuts[:-1], cuts[1:]):
        part = slice(start, stop)
        forwards.append(kda.forward(q[part], k[part], v[part], np.log(g[part]), beta[part], initial_state=state,
                                    options=options, engine=engine))
        state = forwards[-1].final_state
        assert np.isclose(state.item(), {1: 2, 2: 1.8, 3: 3.54}[stop], rtol=1e-14)
    gradient = ones
    for start, fwd in zip(cuts[-2::-1], forwards[::-1]):
        gradient = kda.backward(fwd, np.ones_like(fwd.out), gradient).d_initial_state
        assert np.isclose(gradient.item(), {2: 1, 1: 0.9, 0: 0.75}[start], rtol=1e-14)


def test_negligible_transitions_leave_the_data_terms():
    states = np.ravel(prefix(pairs([1e-6] * 3, S), np.ones((1, 1))))
    gradients = np.ravel(suffix(pairs([1e-6] * 3, D), np.ones((1, 1))))
    assert np.abs(states - [2.0, 1.0, 3.0]).max() <= 3e-6
    assert np.abs(gradients - [0.3, 0.5, 0.7]).max() <= 3e-6


def test_a_pair_without_transition_starts_afresh():
    chain = [Affine(None, np.full((1, 1), 5.0)), *pairs([0.5], [1.0])]
    assert np.ravel(prefix(chain, np.full((1, 1), np.nan))).tolist() == [5.0, 3.5]


def test_scans_equal_composition():
    random = np.random.default_rng(0)
    chain = [Affine(random.standard_normal((2, 4, 4)), random.standard_normal((2, 4, 3))) for _ in range(5)]
    initial = random.standard_normal((2, 4, 3))
    whole = chain[0]
    for pair in chain[1:]:
        whole = pair.after(whole)
    assert np.allclose(prefix(chain, initial)[-1], whole.apply(initial), rtol=1e-13)


@pytest.mark.parametrize("scan", [prefix, suffix])
def test_an_empty_chain_has_no_boundaries(scan):
    assert scan([], np.ones((1, 1))) == []
