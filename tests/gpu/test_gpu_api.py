"""The public calls on device arrays: what comes in decides what comes out, and nothing is misread."""

from dataclasses import replace

import cupy
import ml_dtypes
import numpy as np
import pytest

import kda_engine as kda
from kda_engine import cases
from kda_engine.arrays import to_host
from kda_engine.compare import DEVICE_TOLERANCES
from kda_engine.compat import chunk_kda_with_backward

TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def call(case, engine="cuda", **changed):
    given = {name: getattr(case, name) for name in TENSORS} | changed
    return kda.forward(**given, cu_seqlens=case.cu_seqlens, options=case.options, engine=engine)


def close(a, b, tolerance):
    assert kda.compare(to_host(a), to_host(b)) <= tolerance


def test_results_come_back_where_the_inputs_were():
    case = cases.make("packed", K=32, V=48)
    for module, kind in ((np, np.ndarray), (cupy, cupy.ndarray)):
        result = call(case, **{name: module.asarray(getattr(case, name)) for name in TENSORS})
        assert type(result.out) is kind and type(result.final_state) is kind
        close(result.out, call(case, "reference").out, DEVICE_TOLERANCES["float32"])


def test_the_engine_is_chosen_where_a_device_is():
    case = cases.make("ordinary")
    assert call(case, "auto").out.tobytes() == call(case, "cuda").out.tobytes()


def test_another_librarys_names_on_device_arrays():
    """`compat.chunk_kda` with CuPy arrays: the same bits as the engine's own call, gradients in the caller's shapes."""
    case = cases.make("ordinary", dtype="bfloat16", K=128, V=128)
    x = {name: cupy.asarray(getattr(case, name)) for name in TENSORS}
    batch = {name: x[name][None] for name in ("q", "k", "v", "g", "beta")}
    out, state, pull = chunk_kda_with_backward(
        **batch, A_log=x["A_log"], dt_bias=x["dt_bias"].ravel(), initial_state=x["initial_state"],
        use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0, use_beta_sigmoid_in_kernel=True,
        use_qk_l2norm_in_kernel=True, output_final_state=True)
    expected = call(case, **x)
    assert type(out) is cupy.ndarray and out[0].tobytes() == expected.out.tobytes()
    assert state.tobytes() == expected.final_state.tobytes()
    gradients, right = pull(cupy.asarray(case.d_out)[None]), kda.backward(expected, cupy.asarray(case.d_out))
    assert gradients.dk[0].tobytes() == right.dk.tobytes() and gradients.dk.shape == batch["k"].shape
    assert gradients.ddt_bias.tobytes() == right.ddt_bias.tobytes() and gradients.ddt_bias.ndim == 1


def test_batch_equals_its_sequences_packed():
    case = cases.make("packed", lengths=(24, 24, 24))
    batched = {name: getattr(case, name).reshape((3, 24) + getattr(case, name).shape[1:])
               for name in ("q", "k", "v", "g", "beta")}
    result = call(replace(case, cu_seqlens=None), **batched)
    expected = call(case)
    assert result.out.reshape(expected.out.shape).tobytes() == expected.out.tobytes()
    assert result.final_state.tobytes() == expected.final_state.tobytes()


def test_state_layouts_are_each_others_transpose():
    case = cases.make("VK", K=64, V=32)
    swapped = replace(case, options=replace(case.options, state_layout="KV"))
    expected = call(swapped, initial_state=np.ascontiguousarray(case.initial_state.swapaxes(2, 3)))
    result = call(case)
    assert result.final_state.shape == case.initial_state.shape
    assert np.array_equal(result.final_state, expected.final_state.swapaxes(2, 3))
    assert result.out.tobytes() == expected.out.tobytes()


def test_arrays_that_are_not_contiguous_or_aligned():
    case = cases.make("packed", dtype="bfloat16", K=64, V=64)
    expected = call(case).out

    def strided(x):
        wide = cupy.zeros(x.shape[:-1] + (x.shape[-1] * 2,), x.dtype)
        wide[..., ::2] = cupy.asarray(x)
        return wide[..., ::2]

    def shifted(x):
        flat = cupy.zeros(x.size + 1, x.dtype)
        flat[1:] = cupy.asarray(x).ravel()
        return flat[1:].reshape(x.shape)

    for change in (strided, shifted):
        result = call(case, **{name: cupy.asarray(getattr(case, name)) for name in TENSORS}
                      | {name: change(getattr(case, name)) for name in ("q", "k", "v", "g")})
        assert to_host(result.out).tobytes() == expected.tobytes(), change.__name__


@pytest.mark.parametrize("name, tokens", [("ordinary", 2048), ("packed", None), ("softplus-logit", 300),
                                          ("tokens-1", None)])
def test_no_initial_state_is_one_of_zeros(name, tokens):
    given = {} if tokens is None else {"tokens": tokens}
    case = cases.make(name, dtype="bfloat16", K=128, V=128, **given)
    without, zeros = (call(case, initial_state=state) for state in (None, 0 * case.initial_state))
    assert without.out.tobytes() == zeros.out.tobytes()
    assert without.final_state.tobytes() == zeros.final_state.tobytes()
    found, expected = (kda.backward(fwd, case.d_out) for fwd in (without, zeros))
    for tensor, x in vars(expected).items():
        assert (x is None and getattr(found, tensor) is None) or getattr(found, tensor).tobytes() == x.tobytes(), tensor


@pytest.mark.parametrize("K", (64, 128))
def test_a_state_that_is_not_contiguous_or_aligned(K):
    case = cases.make("packed", dtype="bfloat16", K=K, V=K)
    flat = cupy.zeros(case.initial_state.size + 1, "f4")
    flat[1:] = cupy.asarray(case.initial_state).ravel()
    wide = cupy.zeros(case.initial_state.shape[:-1] + (2 * K,), "f4")
    wide[..., ::2] = cupy.asarray(case.initial_state)
    expected = call(case).out
    given = {name: cupy.asarray(getattr(case, name)) for name in TENSORS}
    for state in (flat[1:].reshape(case.initial_state.shape), wide[..., ::2]):
        assert to_host(call(case, **given | {"initial_state": state}).out).tobytes() == expected.tobytes()


def test_mixed_types_lose_nothing():
    case = cases.make("packed", K=64, V=64)
    half = {name: getattr(case, name).astype(ml_dtypes.bfloat16) for name in ("q", "k", "v")}
    result = call(case, **half)
    assert result.out.dtype == ml_dtypes.bfloat16
    close(result.final_state, call(case, "reference", **half).final_state, DEVICE_TOLERANCES["float32"])


def test_decoding_token_by_token_equals_the_whole():
    case = cases.make("softplus-logit", K=64, V=64, lengths=(12,))
    whole = call(case)
    state = case.initial_state
    for t in range(12):
        token = {name: getattr(case, name)[t : t + 1] for name in ("q", "k", "v", "g", "beta")}
        out, state = kda.step(**token, state=state, A_log=case.A_log, dt_bias=case.dt_bias, options=case.options,
                              engine="cuda")
        close(out, whole.out[t : t + 1], DEVICE_TOLERANCES["float32"])
    close(state, whole.final_state, DEVICE_TOLERANCES["float32"])


def test_summaries_compose_to_the_state_of_the_whole():
    case = cases.make("ordinary", K=32, V=16, tokens=96)
    given = lambda span: {name: getattr(case, name)[span] for name in ("k", "v", "g", "beta")}
    parameters = {"A_log": case.A_log, "dt_bias": case.dt_bias, "options": case.options, "engine": "cuda"}
    first, second = (kda.summarize(**given(span), **parameters) for span in (slice(0, 32), slice(32, 96)))
    close(second.after(first).apply(case.initial_state), call(case).final_state, DEVICE_TOLERANCES["float32"])


def test_backward_runs_on_device_arrays():
    case = cases.make("packed", K=8, V=8)
    gradients = kda.backward(call(case, **{name: cupy.asarray(getattr(case, name)) for name in TENSORS}),
                             cupy.asarray(case.d_out), cupy.asarray(case.d_final_state))
    expected = kda.backward(call(case, "reference"), case.d_out, case.d_final_state)
    for name, x in vars(expected).items():
        close(getattr(gradients, name), x, 1e-5)


def test_what_cannot_be_computed_is_refused():
    with pytest.raises(kda.InputError, match="k: expected a head size of at most 256"):
        call(cases.make("ordinary", K=257))
    with pytest.raises(kda.InputError, match="v: expected a head size of at most 256"):
        call(cases.make("ordinary", V=300))
    with pytest.raises(kda.InputError, match="float64"):
        call(cases.make("ordinary", dtype="float64"))
