"""The tuned path under gates without a bound: decays of every size, within a token and from token to token."""

from dataclasses import replace

import numpy as np
import pytest
from device_run import check
from gates import gated
from gradient_run import check_gradients, gradients
from test_gpu_chain import DTYPES, tuned

import kda_engine as kda
from kda_engine.engines.cuda import CudaEngine
from kda_engine.engines.reference import ReferenceEngine

pytestmark = pytest.mark.usefixtures("needs_hopper")

FORMS = ("softplus", "log")

# Nats: within a shared factor's span, about its limits, past them, past float16 and past float32.
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


def test_resets():
    """Channels, now and then all of them, forget everything: log decays of -inf."""
    case = gated("log", 1.0, "bfloat16", heads=2, tokens=200)
    g = case.g.copy()
    g[np.random.default_rng(1).random(g.shape) < 0.1] = -np.inf
    g[7::23] = -np.inf
    check(tuned(replace(case, g=g)))
    check_gradients(tuned(replace(case, g=g)))


@pytest.mark.parametrize("form", FORMS)
def test_grouped_heads(form):
    case = tuned(gated(form, 90.0, "bfloat16", heads=2, value_heads=6, tokens=100))
    check(case)
    check_gradients(case)


@pytest.mark.parametrize("least, decides", ((1.0, True), (0.0, False)))
@pytest.mark.parametrize("form", FORMS)
def test_certified_skip(form, least, decides, dealt, warmups):
    """Every channel of every token decays by about `least` at least."""
    dealt(8, 128)
    case = gated(form, 0.5, "bfloat16", heads=2, tokens=512, least=least)
    skipping = tuned(replace(case, options=replace(case.options, tolerance=1e-6)))
    check(skipping, summaries=False)
    check_gradients(skipping)
    assert warmups[False] and warmups[True]
    assert all(((chunks >= 0) == decides).all() for chunks in (*warmups[False], *warmups[True]))
