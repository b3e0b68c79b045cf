"""Segments as affine maps: summaries compose to the whole wherever it is cut, forward and backward."""

from dataclasses import replace

import numpy as np
import pytest
from oracle import arguments

import kda_engine as kda
from kda_engine import Affine, cases
from kda_engine.scan import prefix, suffix

ENGINES = ("numpy", "reference")
NAMES = ["tokens-127", "softplus-logit2", "log-value", "grouped-heads", "wide-keys", "wide-values", "resets", "relay",
         "alternating-reflecting", "equal-keys", "no-parameters", "no-l2norm"]


def summary(case, span=slice(None), engine="numpy"):
    return kda.summarize(*(x[span] for x in (case.k, case.v, case.g, case.beta)), A_log=case.A_log,
                         dt_bias=case.dt_bias, options=case.options, engine=engine)


def single(name, **overrides):
    """A float64 case of one sequence."""
    case = cases.make(name, dtype="f8", **overrides)
    if case.cu_seqlens is None:
        return case
    return cases.make(name, dtype="f8", lengths=(len(case.q),))


def random_pair(random, K=3, V=2):
    return Affine(random.standard_normal((2, K, K)), random.standard_normal((2, K, V)))


def test_the_algebra():
    random = np.random.default_rng(0)
    a, b, c = (random_pair(random) for _ in range(3))
    state, d_state = random.standard_normal((2, 3, 2)), random.standard_normal((2, 3, 2))
    assert kda.compare(b.after(a).apply(state), b.apply(a.apply(state))) <= 1e-15
    left, right = c.after(b).after(a), c.after(b.after(a))
    assert kda.compare(left.M, right.M) <= 1e-15 and kda.compare(left.S, right.S) <= 1e-15
    identity = Affine.identity((2,), 3, 2, "f8", np)
    for pair in (identity.after(a), a.after(identity)):
        assert np.array_equal(pair.M, a.M) and np.array_equal(pair.S, a.S)
    # The transposed map is the adjoint: <M x, y> = <x, M^T y>.
    linear = Affine(a.M, 0 * a.S)
    left, right = (linear.apply(state) * d_state).sum(), (state * linear.apply_transposed(d_state)).sum()
    assert abs(left - right) <= 1e-14 * abs(left)


def test_worked_example_of_three_ranks():
    scalar = lambda m, s: Affine(np.array([[m]]), np.array([[s]]))
    numbers = lambda states: [float(x[0, 0]) for x in states]
    M, S, D = (0.5, 0.4, 0.3), (2.0, 1.0, 3.0), (0.3, 0.5, 0.7)
    one = np.ones((1, 1))
    forward = numbers(prefix([scalar(m, s) for m, s in zip(M, S)], one))
    backward = numbers(suffix([scalar(m, d) for m, d in zip(M, D)], one))
    assert np.allclose(forward, [2.5, 2.0, 3.6], rtol=1e-15) and np.allclose(backward, [0.75, 0.9, 1.0], rtol=1e-15)
    weak = numbers(prefix([scalar(1e-6, s) for s in S], one)), numbers(suffix([scalar(1e-6, d) for d in D], one))
    assert np.allclose(weak[0], [2, 1, 3], rtol=0, atol=3e-6)
    assert np.allclose(weak[1], [0.3, 0.5, 0.7], rtol=0, atol=3e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_a_summary_places_a_segment_anywhere(name, engine):
    """final state = M initial state + S, for any initial state."""
    case = single(name)
    given, options = arguments(case)
    pair = summary(case, engine=engine)
    random = np.random.default_rng(1)
    state = random.standard_normal(case.initial_state.shape)
    final = kda.forward(*given, **(options | {"initial_state": state}), engine=engine).final_state
    assert kda.compare(pair.apply(state), final) <= 1e-12


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_halves_compose_to_the_whole(name, engine):
    case = single(name)
    T = len(case.q)
    # The first token of `relay` takes away all but 1e-13 of what its key holds: that many digits are left of M.
    tolerance = 1e-9 if name == "relay" else 1e-12
    whole = summary(case, engine=engine)
    for cut in (0, 1, 16, 31, T // 2, T):
        pair = summary(case, slice(cut, None), engine).after(summary(case, slice(0, cut), engine))
        assert kda.compare(pair.M, whole.M) <= tolerance and kda.compare(pair.S, whole.S) <= 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_passes_through_the_transposed_transition(name):
    """d_initial_state = M^T d_final_state + D, D being what the outputs alone send back."""
    case = single(name)
    given, options = arguments(case)
    fwd = kda.forward(*given, **options, engine="numpy")
    zero = kda.backward(fwd, case.d_out).d_initial_state
    full = kda.backward(fwd, case.d_out, case.d_final_state).d_initial_state
    pair = Affine(summary(case).M, zero)
    assert kda.compare(pair.apply_transposed(case.d_final_state), full) <= 1e-12


@pytest.mark.parametrize("name", ["tokens-127", "ragged", "heads-differ", "repeat"])
def test_float32_summaries(name):
    case = cases.make(name)
    wide = replace(case, **{x: getattr(case, x).astype("f8") for x in ("k", "v", "g", "beta", "A_log", "dt_bias")})
    both = [kda.summarize(x.k, x.v, x.g, x.beta, A_log=x.A_log, dt_bias=x.dt_bias, cu_seqlens=x.cu_seqlens,
                          options=x.options, engine=engine) for x, engine in ((case, "numpy"), (wide, "reference"))]
    assert both[0].M.dtype == both[0].S.dtype == np.float32 and both[0].M.shape == case.initial_state.shape[:2] + (
        case.k.shape[2],) * 2
    assert kda.compare(both[0].M, both[1].M) <= 2e-5 and kda.compare(both[0].S, both[1].S) <= 2e-5


def test_alternating_decay_keeps_half_the_state_that_channel_sums_give_up():
    """Two channels decay in turn by five nats, the one key lies between them: four tokens, channel sums of -10."""
    k = np.full((4, 1, 2), 0.5**0.5)
    g = np.array([[0.0, -5], [-5, 0], [0, -5], [-5, 0]])[:, None]
    norm = lambda beta: np.linalg.norm(
        kda.summarize(k, 0 * k, g, np.full((4, 1), beta), engine="numpy",
                      options=kda.Options(gate="log", beta="value", qk_l2norm=False)).M[0, 0], 2)
    assert abs(norm(1.0) - 0.09) <= 0.005 and abs(norm(2.0) - 1.0) <= 0.005
    assert abs(np.exp(g.sum(axis=0).max()) - 4.5e-5) <= 1e-6


def test_relay_halves_its_output_from_chunk_to_chunk_while_every_channel_decays():
    case = cases.make("relay", dtype="f8", tokens=96, K=32, V=16)
    given, options = arguments(case)
    out = kda.forward(*given, **options, engine="reference").out
    norms = [np.linalg.norm(out[start : start + 16]) for start in range(0, 96, 16)]
    assert all(0.45 <= later / earlier <= 0.55 for earlier, later in zip(norms, norms[1:]))
    rate, bias = np.exp(case.A_log)[:, None], case.dt_bias
    log_decay = -5 / (1 + np.exp(-rate * (case.g + bias)))
    assert np.allclose(log_decay.reshape(6, 16, 2, 32).sum(axis=1), -40, rtol=1e-9)
    assert log_decay.max(axis=-1).sum() > -1e-6
