"""Scans over boundary pairs, on the worked example of docs/operator.md."""

import numpy as np
import pytest

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
