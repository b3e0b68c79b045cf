"""exp(A_log) beyond float32: the decays and gradients that come of it are mostly ordinary numbers."""

from dataclasses import replace

import numpy as np
import pytest
from device_run import check
from gradient_run import check_gradients

from kda_engine import cases

# Gate form, A_log, middle of raw g: the sigmoid is saturated, or e^(A_log + g) is about e^-2.
RATES = (("lower_bound", 89, 0), ("lower_bound", 300, 0), ("softplus", 86, -88), ("softplus", 89, -91),
         ("softplus", 120, -122))


def rated(form, A_log, middle, dtype, K):
    case = cases.make("strong", dtype=dtype, tokens=70, heads=2, K=K, V=K)
    g = middle + np.sign(case.g.astype("f4")) * (0.1 + abs(case.g.astype("f4")))
    return replace(case, g=g.astype(case.g.dtype), dt_bias=None, A_log=np.array([A_log, 0.5 * A_log], "f4"),
                   options=replace(case.options, gate=form))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("rate", RATES)
def test_rates_beyond_float32(rate, dtype):
    case = rated(*rate, dtype, K=64)
    check(case)
    check_gradients(case)


@pytest.mark.parametrize("A_log", (80, 89, 300))
def test_rates_beyond_float32_on_the_fused_path(A_log, needs_hopper):
    case = rated("lower_bound", A_log, 0, "bfloat16", K=128)
    check(case)
    check_gradients(case)


@pytest.mark.parametrize("K", (64, 128))
@pytest.mark.parametrize("gate", ("lower_bound", "softplus"))
def test_a_rate_that_is_no_number_is_not_hidden(gate, K):
    import kda_engine as kda

    case = rated(gate, 1, 0, "bfloat16", K)
    A_log = case.A_log.copy()
    A_log[1] = np.nan
    out = kda.forward(case.q, case.k, case.v, case.g, case.beta, A_log, options=case.options, engine="cuda").out
    assert np.isnan(out[1:, 1].astype("f4")).all() and np.isfinite(out[:, 0].astype("f4")).all()
