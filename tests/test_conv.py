"""The short convolution: its definition, halos at every cut, the adjoint by complex steps and real differences."""

import ml_dtypes
import numpy as np
import pytest

import kda_engine as kda

LENGTHS = (7, 0, 1, 3, 12)
T, N, CHANNELS, W = sum(LENGTHS), len(LENGTHS), 6, 4
BOUNDS = np.concatenate([[0], np.cumsum(LENGTHS)])


def problem(dtype="f8", W=W):
    random = np.random.default_rng(3)
    normal = lambda *shape: random.standard_normal(shape).astype(dtype)
    return normal(T, CHANNELS), normal(CHANNELS, W), normal(CHANNELS), normal(N, W - 1, CHANNELS), normal(T, CHANNELS)


def definition(x, weight, bias, activation, halo):
    """Token by token, complex numbers allowed."""
    y = np.zeros(x.shape, np.result_type(x, weight, bias, halo))
    for n in range(N):
        before = np.concatenate([halo[n], x[BOUNDS[n] : BOUNDS[n + 1]]])
        for t in range(LENGTHS[n]):
            total = bias + sum(weight[:, w] * before[t + w] for w in range(weight.shape[1]))
            y[BOUNDS[n] + t] = total / (1 + np.exp(-total)) if activation == "silu" else total
    return y


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_equals_the_definition(activation, width):
    x, weight, bias, halo, _ = problem(W=width)
    y = kda.short_conv(x, weight, bias, activation, BOUNDS, halo)
    assert kda.compare(y, definition(x, weight, bias, activation, halo)) <= 1e-15
    without = kda.short_conv(x, weight, None, activation, BOUNDS)
    assert kda.compare(without, definition(x, weight, 0 * bias, activation, 0 * halo)) <= 1e-15


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", [1, 4])
def test_adjoint_equals_complex_steps(activation, width):
    x, weight, bias, halo, dy = problem(W=width)
    result = kda.short_conv_backward(dy, x, weight, bias, activation, BOUNDS, halo)
    inputs = {"x": x, "weight": weight, "bias": bias, "halo": halo}
    for computed, (name, value) in zip(result, inputs.items()):
        exact = np.zeros(value.shape)
        for at in np.ndindex(value.shape):
            varied = value.astype(complex)
            varied[at] += 1e-40j
            given = inputs | {name: varied}
            y = definition(given["x"], given["weight"], given["bias"], activation, given["halo"])
            exact[at] = (y.imag * dy).sum() / 1e-40
        assert kda.compare(computed, exact) <= 1e-14, name


def test_adjoint_equals_real_differences():
    x, weight, bias, halo, dy = problem()
    dx, dweight, dbias, dhalo = kda.short_conv_backward(dy, x, weight, bias, "silu", BOUNDS, halo)
    random = np.random.default_rng(4)
    for name, gradient in {"x": dx, "weight": dweight, "bias": dbias, "halo": dhalo}.items():
        given = {"x": x, "weight": weight, "bias": bias, "halo": halo}
        direction = random.standard_normal(gradient.shape)

        def loss(h):
            y = kda.short_conv(**(given | {name: given[name] + h * direction}), activation="silu", cu_seqlens=BOUNDS)
            return (y * dy).sum()

        differences = (4 * (loss(1e-3) - loss(-1e-3)) / 2e-3 - (loss(2e-3) - loss(-2e-3)) / 4e-3) / 3
        assert abs(differences - (gradient * direction).sum()) <= 1e-9 * max(1, abs(differences)), name


def test_every_cut_with_its_halo_equals_the_uncut_run():
    """One sequence cut anywhere: forward by the tokens before the cut, backward by adding what flows back to them."""
    random = np.random.default_rng(5)
    length = 9
    x, dy = random.standard_normal((length, CHANNELS)), random.standard_normal((length, CHANNELS))
    weight, bias = random.standard_normal((CHANNELS, W)), random.standard_normal(CHANNELS)
    first_halo = random.standard_normal((1, W - 1, CHANNELS))
    y = kda.short_conv(x, weight, bias, halo=first_halo)
    dx, dweight, dbias, dhalo = kda.short_conv_backward(dy, x, weight, bias, halo=first_halo)
    for cut in range(length + 1):
        before = np.concatenate([first_halo[0], x[:cut]])
        halo = before[None, cut : cut + W - 1]
        left = kda.short_conv(x[:cut], weight, bias, halo=first_halo)
        right = kda.short_conv(x[cut:], weight, bias, halo=halo)
        assert kda.compare(np.concatenate([left, right]), y) <= 1e-15
        back_right = kda.short_conv_backward(dy[cut:], x[cut:], weight, bias, halo=halo)
        back_left = kda.short_conv_backward(dy[:cut], x[:cut], weight, bias, halo=first_halo)
        # The halo's gradient belongs to the last W - 1 of (first halo, left tokens).
        joined = np.concatenate([back_left[3][0], back_left[0]])
        joined[cut : cut + W - 1] += back_right[3][0]
        assert kda.compare(joined[: W - 1], dhalo[0]) <= 1e-14
        assert kda.compare(np.concatenate([joined[W - 1 :], back_right[0]]), dx) <= 1e-14
        assert kda.compare(back_left[1] + back_right[1], dweight) <= 1e-14
        assert kda.compare(back_left[2] + back_right[2], dbias) <= 1e-14


@pytest.mark.parametrize("dtype, rounding", [(ml_dtypes.bfloat16, 2.0**-8), ("f2", 2.0**-10), ("f4", 1e-6)])
def test_types(dtype, rounding):
    x, weight, bias, halo, dy = problem(dtype)
    wide = [a.astype("f8") for a in (x, weight, bias, halo, dy)]
    y = kda.short_conv(x, weight, bias, cu_seqlens=BOUNDS, halo=halo)
    assert y.dtype == np.dtype(dtype) and y.shape == x.shape
    assert kda.compare(y, kda.short_conv(*wide[:3], cu_seqlens=BOUNDS, halo=wide[3])) <= rounding
    result = kda.short_conv_backward(dy, x, weight, bias, cu_seqlens=BOUNDS, halo=halo)
    exact = kda.short_conv_backward(wide[4], *wide[:3], cu_seqlens=BOUNDS, halo=wide[3])
    assert result[0].dtype == np.dtype(dtype) and kda.compare(result[0], exact[0]) <= rounding
    for computed, expected in zip(result[1:], exact[1:]):
        assert computed.dtype == np.float32 and kda.compare(computed, expected) <= 1e-6


def test_heads_are_channels_and_no_bias_has_no_gradient():
    x, weight, _, _, dy = problem()
    y = kda.short_conv(x.reshape(T, 2, 3), weight, cu_seqlens=BOUNDS)
    assert y.shape == (T, 2, 3)
    assert np.array_equal(y.reshape(T, CHANNELS), kda.short_conv(x, weight, cu_seqlens=BOUNDS))
    dx, _, dbias, dhalo = kda.short_conv_backward(dy.reshape(T, 2, 3), x.reshape(T, 2, 3), weight, cu_seqlens=BOUNDS)
    assert dx.shape == (T, 2, 3) and dbias is None and dhalo.shape == (N, W - 1, CHANNELS)


def test_no_tokens():
    x, weight, bias, _, _ = problem()
    assert kda.short_conv(x[:0], weight, bias).shape == (0, CHANNELS)
    dx, dweight, dbias, dhalo = kda.short_conv_backward(x[:0], x[:0], weight, bias)
    assert dx.shape == (0, CHANNELS) and not dweight.any() and not dbias.any() and not dhalo.any()


@pytest.mark.parametrize("changed, message", [
    ({"x": np.zeros(5)}, r"x: expected \[T, channels\] or \[T, H, K\], got shape \(5,\)"),
    ({"weight": np.zeros((5, 4))}, r"weight: expected shape \(6, W\), got \(5, 4\)"),
    ({"weight": np.zeros((6, 0))}, r"weight: expected shape \(6, W\), got \(6, 0\)"),
    ({"bias": np.zeros(5)}, r"bias: expected shape \(6,\), got \(5,\)"),
    ({"halo": np.zeros((5, 4, 6))}, r"halo: expected shape \(5, 3, 6\), got \(5, 4, 6\)"),
    ({"activation": "relu"}, "activation: expected 'silu' or None, got 'relu'"),
    ({"cu_seqlens": [0, 3]}, "cu_seqlens: expected to start at 0 and end at T = 23"),
])
def test_bad_arguments_are_named(changed, message):
    x, weight, bias, halo, _ = problem()
    given = {"x": x, "weight": weight, "bias": bias, "activation": "silu", "cu_seqlens": BOUNDS, "halo": halo}
    with pytest.raises(kda.InputError, match=message):
        kda.short_conv(**(given | changed))


@pytest.mark.parametrize("name", ["x", "weight", "bias", "halo"])
def test_integers_are_no_values(name):
    x, weight, bias, halo, _ = problem()
    given = {"x": x, "weight": weight, "bias": bias, "halo": halo}
    given[name] = given[name].astype("i4")
    with pytest.raises(kda.InputError, match=f"{name}: expected bfloat16, float16, float32 or float64, got int32"):
        kda.short_conv(**given, cu_seqlens=BOUNDS)


def test_bad_output_gradient_is_named():
    x, weight, bias, _, dy = problem()
    with pytest.raises(kda.InputError, match=r"dy: expected shape \(23, 6\), got \(22, 6\)"):
        kda.short_conv_backward(dy[1:], x, weight, bias, cu_seqlens=BOUNDS)
