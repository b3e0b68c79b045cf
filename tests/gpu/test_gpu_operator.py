"""The operator with everything but its arrays fixed: bit for bit what the public calls give, captured in a graph or not."""

import cupy
import numpy as np
import pytest

import kda_engine as kda
from kda_engine.arrays import BFLOAT16

pytestmark = pytest.mark.usefixtures("needs_hopper")

FLOAT16 = np.dtype("f2")
# Tokens, heads, value heads, bounds of the sequences, options, type: cut sequences, whole ones, a few tokens each.
KINDS = {
    "cut": (3000, 2, 2, None, kda.Options(), BFLOAT16),
    "certified": (3000, 2, 2, None, kda.Options(tolerance=1e-6), BFLOAT16),
    "grouped": (700, 2, 4, [0, 100, 100, 433, 700], kda.Options(gate="softplus"), FLOAT16),
    "log": (300, 3, 3, [0, 300], kda.Options(gate="log", beta="logit2"), BFLOAT16),
    "decode": (40, 4, 4, list(range(0, 41, 4)), kda.Options(), BFLOAT16),
}


def drawn(kind, seed):
    """The arrays of a call by name, d_out and d_final_state among them."""
    tokens, heads, value_heads, bounds, options, dtype = KINDS[kind]
    random = cupy.random.default_rng(seed)
    draw = lambda *shape: random.standard_normal(shape, dtype="f4")
    states = (1 if bounds is None else len(bounds) - 1, value_heads, 128, 128)
    x = {"q": draw(tokens, heads, 128), "k": draw(tokens, heads, 128), "v": draw(tokens, value_heads, 128),
         "g": draw(tokens, value_heads, 128), "beta": draw(tokens, value_heads)}
    if options.gate == "log":
        x["g"] = -cupy.exp(x["g"])
    x = {name: value.astype(dtype) for name, value in x.items()}
    if options.gate != "log":
        x |= {"A_log": 0.3 * draw(value_heads), "dt_bias": draw(value_heads, 128)}
    return x | {"initial_state": 0.1 * draw(*states)}, draw(tokens, value_heads, 128).astype(dtype), draw(*states)


def operator_of(kind, **more):
    bounds, options = KINDS[kind][3:5]
    return kda.Operator(**drawn(kind, 0)[0], options=options,
                        cu_seqlens=None if bounds is None else np.array(bounds), **more)


def public(kind, x, d_out=None, d_state=None):
    """{name: array} of the public calls."""
    bounds, options = KINDS[kind][3:5]
    fwd = kda.forward(**x, options=options, cu_seqlens=None if bounds is None else np.array(bounds), engine="cuda")
    found = {"out": fwd.out, "final_state": fwd.final_state}
    return found if d_out is None else found | vars(kda.backward(fwd, d_out, d_state))


def copied(results, gradients=None):
    """The same of an operator's results, which its next call overwrites."""
    found = dict(zip(("out", "final_state"), results)) | (vars(gradients) if gradients is not None else {})
    return {name: None if x is None else x.copy() for name, x in found.items()}


def hold(found, expected, what):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        same = x is found[name] if x is None else x.dtype == found[name].dtype and x.tobytes() == found[name].tobytes()
        assert same, f"{name}: {what}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_gives_the_bits_of_the_public_call(kind):
    backward = kind != "decode"
    operator = operator_of(kind, backward=backward)
    for seed in (1, 2, 1):
        x, *given = drawn(kind, seed)
        given = given if backward else []
        results = operator.forward(**x)
        # Another call between the two, which takes the memory that is free.
        public("cut", drawn("cut", 7)[0])
        found = copied(results, operator.backward(*given) if backward else None)
        hold(found, public(kind, x, *given), f"seed {seed}")


def test_results_go_where_they_are_wanted():
    operator, (x, _, _) = operator_of("cut"), drawn("cut", 3)
    out, final_state = cupy.empty_like(x["v"]), cupy.empty_like(x["initial_state"])
    found = operator.forward(**x, out=out, final_state=final_state)
    assert found[0].data.ptr == out.data.ptr and found[1].data.ptr == final_state.data.ptr
    hold(copied(found), public("cut", x), "out=")
    # The same arrays again, with other values.
    for name, value in drawn("cut", 4)[0].items():
        x[name][...] = value
    hold(copied(operator.forward(**x, out=out, final_state=final_state)), public("cut", x), "other values")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "decode"])
def test_a_captured_call_is_replayed_with_new_values(kind):
    operator, (x, d_out, d_state) = operator_of(kind, backward=True), drawn(kind, 5)
    operator.forward(**x)
    operator.backward(d_out, d_state)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        results = operator.forward(**x)
        gradients = operator.backward(d_out, d_state)
        graph = stream.end_capture()
    for seed in (6, 7):
        fresh, fresh_out, fresh_state = drawn(kind, seed)
        for name, value in fresh.items():
            x[name][...] = value
        d_out[...], d_state[...] = fresh_out, fresh_state
        # Calls between replays take and give back memory.
        expected = public(kind, x, d_out, d_state)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        hold(copied(results, gradients), expected, f"replay with seed {seed}")


def test_a_captured_forward_of_a_few_tokens():
    operator, (x, _, _) = operator_of("decode"), drawn("decode", 5)
    operator.forward(**x)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        results = operator.forward(**x)
        graph = stream.end_capture()
    x["v"][...] = drawn("decode", 6)[0]["v"]
    expected = public("decode", x)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    hold(copied(results), expected, "replay")
