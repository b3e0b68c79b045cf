"""Gates, beta forms and the q/k norm against 60-digit arithmetic."""

import re
from dataclasses import replace
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest
from oracle import assert_close, run, upcast

import kda_engine as kda
from kda_engine import Options, cases, gate, layout
from kda_engine.compare import TOLERANCES
from kda_engine.options import BETAS, GATES

EXTREMES = [0.0, -0.0, 1e-300, 1e-20, -1e-20, 0.3, -0.3, 1.0, -2.5, 17.0, -17.0, 37.0, -37.0, 88.0, -88.0, 104.0,
            -104.0, 700.0, -700.0, 3000.0, -3000.0]


def digits(formula, values):
    """formula on every value in 60 digits, rounded to float64 once (0 below its range)."""
    with localcontext() as context:
        context.prec, context.Emin, context.Emax = 60, -10**6, 10**6
        return np.array([float(formula(Decimal(float(x)))) for x in values])


def one_plus_exp(x):
    return 1 + x.exp()


def log1p_exp(x):
    # ln(1 + e) for an e far below 60 digits is e itself.
    small = x.exp()
    return small if small < Decimal(10) ** -50 else (1 + small).ln()


def close(computed, exact, tolerance, floor=0.0):
    computed, exact = np.asarray(computed, "f8"), np.asarray(exact)
    assert computed.shape == exact.shape
    assert (abs(computed - exact) <= tolerance * abs(exact) + floor).all(), (computed, exact)


@pytest.mark.parametrize("dtype, tolerance, floor", [("f8", 5e-16, 0), ("f4", 3e-7, 1e-38)])
def test_sigmoid(dtype, tolerance, floor):
    x = np.array(EXTREMES, dtype)
    with np.errstate(all="raise", under="ignore"):
        close(gate.sigmoid(x), digits(lambda v: 1 / one_plus_exp(-v), x), tolerance, floor or 1e-308)
    assert gate.sigmoid(np.array([-np.inf, np.inf], dtype)).tolist() == [0, 1]


@pytest.mark.parametrize("dtype, tolerance, floor", [("f8", 5e-16, 1e-308), ("f4", 3e-7, 1e-38)])
def test_softplus(dtype, tolerance, floor):
    x = np.array(EXTREMES, dtype)
    with np.errstate(all="raise", under="ignore"):
        close(gate.softplus(x), digits(log1p_exp, x), tolerance, floor)


def make_gate(form, dtype="f8", A_log=0.7, bias=0.25, lower_bound=-5.0):
    log_rate = np.full((1, 1), A_log, dtype)
    rate = Decimal(float(np.exp(log_rate)[0, 0]))
    return gate.Gate(form, lower_bound, log_rate, np.full((1, 1), bias, dtype)), rate, Decimal(bias)


def column(values, dtype="f8"):
    """Values as raw gates [T,1,1]; rounded to steps of 1/4 so that adding the bias is exact."""
    return (np.round(np.array(values) * 4) / 4).astype(dtype)[:, None, None]


@pytest.mark.parametrize("dtype, tolerance", [("f8", 1e-14), ("f4", 2e-6)])
def test_log_decay(dtype, tolerance):
    # The rounding of rate * x before the exponential costs |rate x| units there.
    g = column([0, 1, -2, 5, -5, 12, -12, 20, -20], dtype)
    lower, rate, bias = make_gate("lower_bound", dtype, lower_bound=-3.5)
    close(lower.log_decay(g).ravel(), digits(lambda x: Decimal(-3.5) / one_plus_exp(-rate * (x + bias)), g.ravel()),
          tolerance)
    soft, rate, bias = make_gate("softplus", dtype)
    g = column([0, 1, -2, 30, -30, 700, 3000], dtype)
    close(soft.log_decay(g).ravel(), digits(lambda x: -rate * log1p_exp(x + bias), g.ravel()), tolerance)
    log, _, _ = make_gate("log", dtype)
    assert np.array_equal(log.log_decay(np.array([-np.inf, -3, 0], dtype)), np.array([-np.inf, -3, 0], dtype))


@pytest.mark.parametrize("enum, names", [("GateForm", GATES), ("BetaForm", BETAS)])
def test_kernels_number_the_forms_alike(enum, names):
    """Kernels get a form as its place in the tuple; an unknown number would be computed as another form."""
    text = (Path(__file__).resolve().parents[1] / "kernels_cu" / "common" / "gate.cuh").read_text()
    listed = re.search(rf"enum class {enum} : int {{([^}}]*)}}", text)[1]
    numbers = {name: int(number) for name, number in re.findall(r"k(\w+) = (\d+)", listed)}
    assert numbers == {name.title().replace("_", ""): place for place, name in enumerate(names)}


@pytest.mark.parametrize("form", ["lower_bound", "softplus"])
def test_gate_adjoint(form):
    """dg, dA_log and ddt_bias from closed derivatives in 60 digits, far into both tails."""
    g = column([0, 1, -2, 5, -5, 40, -40, 60, -60, 300, -300, 600])
    d = np.linspace(0.5, 1.5, len(g))[:, None, None]
    this, rate, bias = make_gate(form)
    dg, dA_log, ddt_bias = this.adjoint(d, g)
    sigma = lambda x: 1 / one_plus_exp(-x)
    if form == "softplus":
        slope, by_rate = lambda x: -rate * sigma(x + bias), lambda x: -rate * log1p_exp(x + bias)
    else:
        inner = lambda x: Decimal(-5) * sigma(rate * (x + bias)) * sigma(-rate * (x + bias))
        slope, by_rate = lambda x: rate * inner(x), lambda x: rate * (x + bias) * inner(x)
    exact = d.ravel() * digits(slope, g.ravel())
    close(dg.ravel(), exact, 1e-12, 1e-300)
    assert dg.dtype == np.float64 and dA_log.shape == (1,) and ddt_bias.shape == (1, 1)
    close(ddt_bias.ravel(), [exact.sum()], 1e-12)
    close(dA_log, [(d.ravel() * digits(by_rate, g.ravel())).sum()], 1e-12)


def test_gate_adjoint_sums_parameters_in_float64():
    this, _, _ = make_gate("softplus", "f4")
    g = np.full((1 << 16, 1, 1), 0.5, "f4")
    d = np.ones((1 << 16, 1, 1), "f4")
    # Each of the ones is below float32's last digit beside this one.
    d[0] = 2.0**25
    dg, dA_log, ddt_bias = this.adjoint(d, g)
    assert dg.dtype == np.float32 and dA_log.dtype == ddt_bias.dtype == np.float64
    _, one_dA_log, one_ddt_bias = this.adjoint(d[1:2], g[1:2])
    close(ddt_bias, d.sum(dtype="f8") * one_ddt_bias, 1e-6)
    close(dA_log, d.sum(dtype="f8") * one_dA_log, 1e-6)


def test_log_form_passes_the_gradient_through():
    this, _, _ = make_gate("log")
    d = np.arange(6.0).reshape(3, 1, 2)
    dg, dA_log, ddt_bias = this.adjoint(d, -d)
    assert dg is d and not dA_log.any() and ddt_bias.shape == (1, 2)


def test_a_reset_channel_has_no_parameter_gradient():
    this, _, _ = make_gate("softplus")
    g = np.array([[[np.inf]], [[1.0]]])
    d = np.array([[[0.0]], [[2.0]]])
    with np.errstate(invalid="ignore"):
        _, dA_log, _ = this.adjoint(d, g)
    assert np.isfinite(dA_log).all() and dA_log[0] == this.adjoint(d[1:], g[1:])[1][0]


@pytest.mark.parametrize("form", BETAS)
def test_beta_and_its_derivative(form):
    x = np.array([0, 1, -1, 5, -5, 40, -40, 300, -300, 700], "f8")
    sigma = lambda v: 1 / one_plus_exp(-v)
    factor = {"logit": 1, "logit2": 2, "value": None}[form]
    value = (lambda v: v) if factor is None else (lambda v: factor * sigma(v))
    slope = (lambda v: Decimal(1)) if factor is None else (lambda v: factor * sigma(v) * sigma(-v))
    close(gate.activate_beta(x, form), digits(value, x), 5e-16, 1e-308)
    close(gate.beta_adjoint(np.full(len(x), 3.0), x, form), 3 * digits(slope, x), 2e-15, 1e-300)


def test_l2norm_and_its_adjoint():
    random = np.random.default_rng(0)
    x = random.standard_normal((4, 2, 9)) * np.array([1, 1e-3, 1e-8, 1e6])[:, None, None]
    normed, factor = gate.l2norm(x, True)
    close(normed, x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6), 1e-15)
    d = random.standard_normal(x.shape)
    step = 1e-40j
    jacobian = np.empty((9,) + x.shape)
    for i in range(9):
        varied = x.astype(complex)
        varied[..., i] += step
        moved = varied / np.sqrt((varied * varied).sum(-1, keepdims=True) + 1e-6)
        jacobian[i] = moved.imag / 1e-40
    exact = np.moveaxis((jacobian * d).sum(-1), 0, -1)
    close(gate.l2norm_adjoint(d, normed, factor), exact, 1e-12, 1e-15 * abs(exact).max())
    assert gate.l2norm(x, False) == (x, None) and gate.l2norm_adjoint(d, x, None) is d
    zero, factor = gate.l2norm(np.zeros((1, 3), "f4"), True)
    assert not zero.any() and zero.dtype == np.float32
    close(gate.l2norm_adjoint(np.ones((1, 3)), zero, factor), np.full((1, 3), 1e3), 1e-6)


def test_gate_parameters_default_to_zero():
    k = np.zeros((1, 2, 3), "f4")
    beta = np.zeros((1, 2), "f4")
    operands, _ = layout.pack(k, k, k, k, beta, None, None, None, "softplus")
    this = gate.Gate.of(operands, Options(gate="softplus"), "f4")
    assert np.array_equal(this.log_rate, np.zeros((2, 1))) and np.array_equal(this.bias, np.zeros((2, 3)))


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e19, 1e30, 1e38])
def test_the_norm_of_any_float32(size):
    x = np.random.default_rng(0).standard_normal((5, 2, 8)) * size
    d = np.random.default_rng(1).standard_normal(x.shape)
    narrow = x.astype("f4")
    expected, got = gate.l2norm(narrow.astype("f8"), True), gate.l2norm(narrow, True)
    assert got[0].dtype == got[1].dtype == np.float32
    adjoint = [gate.l2norm_adjoint(d.astype(y[0].dtype), *y) for y in (expected, got)]
    assert kda.compare(got[0], expected[0]) < 1e-6 and kda.compare(adjoint[1], adjoint[0]) < 1e-6


@pytest.mark.parametrize("form, masked", [("lower_bound", -3.4e38), ("lower_bound", 3.4e38), ("softplus", 3.4e38),
                                          ("softplus", -3.4e38)])
def test_masked_gates_leave_the_rates_gradient_finite(form, masked):
    """The smallest or largest float32 as a mask: the rate makes it infinite."""
    case = cases.make("ordinary")
    g = case.g.copy()
    g[3:9] = masked
    fwd = kda.forward(case.q, case.k, case.v, g, case.beta, A_log=np.full(2, 2, "f4"), engine="numpy",
                      options=kda.Options(gate=form))
    assert np.all(np.isfinite(kda.backward(fwd, case.d_out).dA_log))


EXTREME_GATES = [("softplus", 87, -90), ("softplus", 89, -92), ("softplus", 100, -101), ("softplus", 300, -302),
                 ("softplus", 89, 3), ("softplus", -100, 95), ("softplus", 1000, -1001), ("softplus", -1000, 5),
                 ("lower_bound", 87, -1e-37), ("lower_bound", 89, -1e-37), ("lower_bound", 89, 7e-37),
                 ("lower_bound", 100, 1), ("lower_bound", 300, -1), ("lower_bound", -100, 95),
                 ("lower_bound", 1000, 0), ("lower_bound", 1000, 1)]


@pytest.mark.parametrize("form, A_log, g", EXTREME_GATES)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_rates_beyond_the_types_range(form, A_log, g, dtype):
    """exp(A_log), or the sigmoid that it multiplies, overflows or underflows; log decay and gradients do not."""
    A_log, x = np.full((1, 1), A_log, dtype), np.array([g, 0.0, g * 1.01, g * 1.001], dtype)
    this = gate.Gate(form, -5.0, A_log, np.zeros((1, 1), dtype))
    rate = Decimal(float(A_log[0, 0])).exp()
    # Beyond e^100000 even these digits end.
    sigma = lambda v: 1 / one_plus_exp(-max(min(v, Decimal(10**5)), Decimal(-10**5)))
    if form == "softplus":
        value, slope = lambda v: -rate * log1p_exp(v), lambda v: -rate * sigma(v)
    else:
        value = lambda v: -5 * sigma(rate * v)
        slope = lambda v: -5 * rate * sigma(rate * v) * sigma(-rate * v)
    d = np.array([1.0, 2.0, 0.5, 0.0], dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = digits(value, x).astype(dtype), np.where(d == 0, 0, d * digits(slope, x)).astype(dtype)
        log_decay = this.log_decay(x[:, None, None]).ravel()
        dg, dA_log, ddt_bias = this.adjoint(d[:, None, None], x[:, None, None])
    # A_log + g is rounded before the exponential: units in the last place of A_log, as errors of the result.
    tolerance = 4 * np.finfo(dtype).eps * (1 + abs(float(A_log[0, 0])))
    for computed, truth in ((log_decay, exact[0]), (dg.ravel(), exact[1])):
        assert not np.isnan(computed).any() and dg.dtype == dtype
        finite = np.isfinite(truth)
        assert (np.isfinite(computed) == finite).all(), (computed, truth)
        close(computed[finite], truth[finite], tolerance, np.finfo(dtype).tiny)
    assert not np.isnan(dA_log).any() and not np.isnan(ddt_bias).any()


@pytest.mark.parametrize("form, A_log, g", [("softplus", 87, -90), ("softplus", 120, -121), ("lower_bound", 89, 0),
                                            ("lower_bound", 300, 1e-3), ("softplus", 89, 0)])
def test_the_engine_takes_rates_beyond_float32(form, A_log, g):
    case = cases.make("ordinary", K=8, V=4)
    raw = (g + 0.3 * case.g).astype("f4") if g else np.zeros_like(case.g)
    case = replace(case, A_log=np.full(2, A_log, "f4"), dt_bias=None, g=raw, options=Options(gate=form))
    computed, expected = run(case, "numpy"), run(upcast(case), "reference")
    for name in ("out", "final_state", "dq", "dk", "dv", "dbeta", "d_initial_state"):
        assert kda.compare(computed[name], expected[name]) <= 2e-5, name
    for name in ("dg", "dA_log"):
        with np.errstate(over="ignore"):
            exact = expected[name].astype(computed[name].dtype)
        finite = np.isfinite(exact)
        assert (np.isfinite(computed[name]) == finite).all() and not np.isnan(computed[name]).any(), name
        assert kda.compare(np.where(finite, computed[name], 0), np.where(finite, exact, 0)) <= 2e-5, name


def test_the_norm_of_a_single_channel_keeps_its_gradients_digits():
    """K = 1: x / sqrt(x^2 + 1e-6) hardly depends on x, and its slope is what is left of a difference."""
    x = np.random.default_rng(0).standard_normal((50, 2, 1))
    for dtype, tolerance in (("f4", 1e-6), ("f8", 1e-15)):
        narrow = x.astype(dtype)
        got = gate.l2norm_adjoint(np.ones_like(narrow), *gate.l2norm(narrow, True))
        exact = 1e-6 * (narrow.astype("f8") ** 2 + 1e-6) ** -1.5
        assert got.dtype == dtype
        close(got.ravel(), exact.ravel(), tolerance)
    case = cases.make("ordinary", K=1, V=3)
    assert_close(run(case, "numpy"), run(upcast(case), "reference"), TOLERANCES["f4"])
