"""The tuned path under gates without a bound: decays of every size, within a token and from token to token."""

from dataclasses import replace

import numpy as np
import pytest
from device_run import check
from gates import gated, lone, spanning
from gradient_run import check_gradients
from stages import gradients, stages
from test_gpu_chain import DTYPES, tuned

import kda_engine as kda
from kda_engine.engines.cuda import CudaEngine
from kda_engine.engines.reference import ReferenceEngine

pytestmark = pytest.mark.usefixtures("needs_hopper")

FORMS = ("softplus", "log")

# Nats of a token: mild, past what gradients share factors for, past float16 and past float32.
REACHES = (0.5, 8.0, 20.0, 90.0, 300.0, 1e4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", (1 << 20, 3))
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("form", FORMS)
def test_decays_of_every_size(form, reach, length, dtype, dealt):
    dealt(length, 128)
    case = tuned(gated(form, reach, dtype, heads=3, tokens=150))
    check(case)
    check_gradients(case)


@pytest.mark.parametrize("lengths", ((1, 2, 3, 0, 5), (16, 31, 32, 33), (15, 17, 1, 64)))
@pytest.mark.parametrize("form", FORMS)
def test_tails(form, lengths):
    case = tuned(gated(form, 300.0, "bfloat16", heads=2, lengths=lengths))
    check(case)
    check_gradients(case)


@pytest.mark.parametrize("form", FORMS)
def test_each_head_by_itself(form):
    """The head that hardly decays has the largest gradients of the gate, and would hide the others'."""
    case = tuned(gated(form, 300.0, "bfloat16", heads=3, tokens=150))
    found, expected = gradients(CudaEngine(), case), gradients(ReferenceEngine(), case)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        for head in range(3):
            error = kda.compare(found[name][:, head], expected[name][:, head])
            assert error <= 5e-3, f"{name}: head {head}: {error:.1e}"


# Nats of a chunk: about the gradients' limit for shared factors, between, and about the chain's.
SPANS = (79.0, 81.0, 120.0, 158.0, 162.0)


@pytest.mark.parametrize("channels", (slice(1, None), slice(77, 78)))
@pytest.mark.parametrize("tokens", ((), (6, 7), (0, 15)))
@pytest.mark.parametrize("nats", SPANS)
@pytest.mark.parametrize("form", FORMS)
def test_where_factors_end_and_levels_begin(form, nats, tokens, channels):
    case = tuned(spanning(form, nats, "bfloat16", tokens, channels, heads=1))
    check(case)
    check_gradients(case)


# Nats of a token: on both sides of where levels begin. Rounding to bfloat16 alone costs 1.7e-3; on an H200 the worst was
# 3.4e-3 before the levels (`log`, 9.5 nats) and 3.9e-3 with them (`softplus`, 12 nats).
@pytest.mark.parametrize("nats", (5.0, 8.0, 9.5, 10.5, 12.0))
@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_of_a_lone_strong_decay_keeps_its_digits(form, nats):
    case, tokens = lone(form, nats)
    found, expected = (gradients(engine, case)["dg"][tokens] for engine in (CudaEngine(), ReferenceEngine()))
    error = kda.compare(found, expected)
    assert error <= 4.5e-3, f"{error:.2e}"


@pytest.mark.parametrize("factor", (1e-4, 1e4, 1e8))
@pytest.mark.parametrize("nats", (0.1, 80.0, 158.0))
def test_keys_and_queries_of_any_size(nats, factor):
    """Their norms travel in the exponents of the decays."""
    case = spanning("log", nats, "bfloat16", (6, 7), heads=1)
    scaled = tuned(replace(case, q=case.q * case.q.dtype.type(factor), k=case.k * case.k.dtype.type(factor)))
    check(scaled)
    check_gradients(scaled)


def test_resets():
    """Channels, now and then all of them, forget everything: log decays of -inf."""
    for form, reset in (("log", -np.inf), ("softplus", np.inf)):
        case = gated(form, 1.0, "bfloat16", heads=2, tokens=200)
        g = case.g.copy()
        g[np.random.default_rng(1).random(g.shape) < 0.1] = reset
        g[7::23] = reset
        check(tuned(replace(case, g=g)))
        check_gradients(tuned(replace(case, g=g)))


def test_log_decays_have_no_parameters():
    found = gradients(CudaEngine(), tuned(gated("log", 20.0, "bfloat16", heads=2, tokens=50)))
    assert not found["dA_log"].any() and not found["ddt_bias"].any()


def test_small_values_after_a_reset():
    """Within 32 tokens of large ones they share a unit and may lose digits; after a second reset all is right."""
    case = gated("log", 0.01, "bfloat16", heads=1, tokens=300)
    g, v = case.g.copy(), case.v.copy()
    g[40] = -np.inf
    v[40:] *= v.dtype.type(2.0**-30)
    g[64] = -np.inf
    case = tuned(replace(case, g=g, v=v, initial_state=np.zeros_like(case.initial_state)))
    found, expected = (stages(engine, case, summaries=False) for engine in (CudaEngine(), ReferenceEngine()))
    assert kda.compare(found["out"][64:], expected["out"][64:]) <= 3e-3
    assert kda.compare(found["final_state"], expected["final_state"]) <= 3e-3


@pytest.mark.parametrize("form", FORMS)
def test_grouped_heads(form):
    case = tuned(gated(form, 90.0, "bfloat16", heads=2, value_heads=6, tokens=100))
    check(case)
    check_gradients(case)


@pytest.mark.parametrize("least, decides", ((1.0, True), (0.0, False)))
@pytest.mark.parametrize("form", FORMS)
def test_certified_skip(form, least, decides, dealt, warmups):
    """Where every channel decays by about `least` every cut is skipped, else none; within the tolerance either way."""
    dealt(8, 128)
    case = gated(form, 0.5, "bfloat16", heads=2, tokens=512, least=least)
    skipping = tuned(replace(case, options=replace(case.options, tolerance=1e-6)))
    check(skipping, summaries=False)
    check_gradients(skipping)
    assert warmups[False] and warmups[True]
    assert all(((chunks >= 0) == decides).all() for chunks in (*warmups[False], *warmups[True]))
