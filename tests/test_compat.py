"""Calls under flash-linear-attention's names: its defaults, what each switch means, and hints for names not known."""

import inspect

import definition
import numpy as np
import pytest

import kda_engine as kda
from kda_engine.compat import chunk_kda, chunk_kda_with_backward, fused_recurrent_kda

# The library's parameters and defaults, as its users type them (fla.ops.kda of August 2026).
CHUNK = {
    "q": None, "k": None, "v": None, "g": None, "beta": None, "scale": None, "initial_state": None,
    "output_final_state": False, "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False, "safe_gate": False, "lower_bound": None,
    "disable_recompute": False, "return_intermediate_states": False, "state_v_first": False, "cu_seqlens": None,
    "cu_seqlens_cpu": None, "cp_context": None,
}
RECURRENT = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "scale", "initial_state", "output_final_state",
             "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
             "lower_bound", "state_v_first", "cu_seqlens")
B, T, H, HV, K, V = 2, 21, 2, 4, 6, 5

# A call's switches, and what they mean in the words of kda_engine.
GATE, SIGMOID = {"use_gate_in_kernel": True}, {"use_beta_sigmoid_in_kernel": True}
CALLS = [
    ({}, kda.Options(gate="log", beta="value", qk_l2norm=False)),
    ({"use_qk_l2norm_in_kernel": True, "scale": 0.3},
     kda.Options(gate="log", beta="value", qk_l2norm=True, scale=0.3)),
    ({**GATE}, kda.Options(gate="softplus", beta="value", qk_l2norm=False)),
    ({**GATE, "lower_bound": -4.0}, kda.Options(gate="lower_bound", lower_bound=-4.0, beta="value", qk_l2norm=False)),
    ({**GATE, **SIGMOID, "safe_gate": True, "lower_bound": -5, "use_qk_l2norm_in_kernel": True}, kda.Options()),
    ({**SIGMOID, "safe_gate": True}, kda.Options(gate="log", beta="logit", qk_l2norm=False)),
    ({**GATE, **SIGMOID, "allow_neg_eigval": True, "disable_recompute": True, "chunk_size": 32},
     kda.Options(gate="softplus", beta="logit2", qk_l2norm=False)),
]


def inputs(gate):
    random = np.random.default_rng(5)
    normal = lambda *shape: random.standard_normal(shape)
    g = normal(B, T, HV, K)
    return {"q": normal(B, T, H, K) / 3, "k": normal(B, T, H, K) / 3, "v": normal(B, T, HV, V),
            "g": g if gate else -np.exp(g), "beta": random.random((B, T, HV)), "A_log": normal(HV),
            "dt_bias": normal(HV * K), "initial_state": normal(B, HV, K, V)}


def expected(x, options, lengths):
    """(out, final state) by the definition, packed; parameters have no effect under the gate "log"."""
    packed = {name: x[name].reshape(-1, *x[name].shape[2:]) for name in ("q", "k", "v", "g", "beta")}
    wide = packed | {"A_log": x["A_log"], "dt_bias": x["dt_bias"].reshape(HV, K), "initial_state": x["initial_state"]}
    out, state = definition.forward({name: y[None].astype(complex) for name, y in wide.items()}, options, lengths)
    return out[0].real, state[0].real


def close(a, b):
    return a.size == b.size and np.linalg.norm((a - b.reshape(a.shape)).ravel()) <= 1e-11 * np.linalg.norm(b.ravel())


@pytest.mark.parametrize("switches, options", CALLS, ids=lambda x: " ".join(x) if isinstance(x, dict) else "")
def test_every_switch_means_what_it_means_there(switches, options):
    x = inputs(switches.get("use_gate_in_kernel"))
    out, state = chunk_kda(**x, output_final_state=True, **switches)
    right, final = expected(x, options, [T] * B)
    assert out.shape == (B, T, HV, V) and close(out, right)
    assert state.shape == (B, HV, K, V) and close(state, final)
    assert chunk_kda(**x, **switches)[1] is None


def test_packed_sequences_and_states_with_values_first():
    x = {name: y[:1] for name, y in inputs(True).items() if name not in ("A_log", "dt_bias", "initial_state")}
    x |= {name: inputs(True)[name] for name in ("A_log", "dt_bias", "initial_state")}
    named = GATE | {"cu_seqlens": np.array([0, 8, T]), "cu_seqlens_cpu": np.array([0, 8, T])}
    right, final = expected(x, kda.Options(gate="softplus", beta="value", qk_l2norm=False), [8, T - 8])
    out, state = chunk_kda(**x, output_final_state=True, **named)
    assert out.shape == (1, T, HV, V) and close(out, right) and close(state, final)
    turned = x | {"initial_state": x["initial_state"].swapaxes(2, 3)}
    out, state = chunk_kda(**turned, output_final_state=True, state_v_first=True, **named)
    assert close(out, right) and close(np.ascontiguousarray(state.swapaxes(2, 3)), final)
    with pytest.raises(kda.InputError, match="cu_seqlens: expected packed input or batch 1"):
        chunk_kda(**inputs(True), cu_seqlens=np.array([0, T]))


def test_positional_arguments_are_in_that_librarys_order():
    x = inputs(True)
    five = [x[name] for name in ("q", "k", "v", "g", "beta")]
    parameters = {name: x[name] for name in ("A_log", "dt_bias")}
    out, state = chunk_kda(*five, 0.5, x["initial_state"], True, True, True, True, **parameters)
    again, other = fused_recurrent_kda(*five, x["A_log"], x["dt_bias"], 0.5, x["initial_state"], True, True, True, True)
    right, final = expected(x, kda.Options(gate="softplus", scale=0.5), [T] * B)
    assert close(out, right) and close(state, final) and np.array_equal(out, again) and np.array_equal(state, other)


def test_names_order_and_defaults():
    here = inspect.signature(chunk_kda).parameters
    assert list(here)[: len(CHUNK)] == list(CHUNK)
    for name, default in CHUNK.items():
        assert here[name].default == (inspect.Parameter.empty if name in ("q", "k", "v", "g", "beta") else default), name
    assert {name for name, p in here.items() if p.kind == p.KEYWORD_ONLY} == {"A_log", "dt_bias", "chunk_size", "engine"}
    assert inspect.signature(chunk_kda_with_backward).parameters == here
    assert tuple(inspect.signature(fused_recurrent_kda).parameters)[:-1] == RECURRENT


@pytest.mark.parametrize("flat", [True, False])
def test_gradients(flat):
    x = inputs(True)
    if not flat:
        x["dt_bias"] = x["dt_bias"].reshape(HV, K)
    random = np.random.default_rng(6)
    do, dht = random.standard_normal((B, T, HV, V)), random.standard_normal((B, HV, K, V))
    *_, pull = chunk_kda_with_backward(**x, **GATE, **SIGMOID)
    gradients = pull(do, dht)

    def loss(**changed):
        out, state = chunk_kda(**x | changed, **GATE, **SIGMOID, output_final_state=True)
        return (out * do).sum() + (state * dht).sum()

    for name, y in x.items():
        gradient = getattr(gradients, "d_initial_state" if name == "initial_state" else f"d{name}")
        assert gradient.shape == y.shape, name
        direction = random.standard_normal(y.shape)
        step = 1e-5 * direction
        slope = (loss(**{name: y + step}) - loss(**{name: y - step})) / 2e-5
        assert abs((gradient * direction).sum() - slope) <= 1e-6 * abs(slope) + 1e-7, name
    assert chunk_kda_with_backward(**inputs(False))[2](do).ddt_bias is None


@pytest.mark.parametrize("named, message", [
    ({"return_intermediate_states": True}, "return_intermediate_states: expected False"),
    ({"cp_context": object()}, "cp_context: expected None; .*mpirun"),
    ({"allow_neg_eigval": True}, "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True"),
    (GATE | {"safe_gate": True}, "lower_bound: expected a number in .* got None"),
    (GATE | {"A_log": None}, "A_log: expected an array"),
    (GATE | {"lower_bound": -6.0}, "lower_bound: expected a number in .* got -6.0"),
    (GATE | {"dt_bias": np.ones(HV)}, r"dt_bias: expected shape \(24,\) or \(4, 6\), got \(4,\)"),
])
def test_what_is_refused(named, message):
    with pytest.raises(kda.InputError, match=message):
        chunk_kda(**inputs(True) | named)


def test_a_name_that_is_not_known_is_no_silence():
    with pytest.raises(TypeError, match="'use_qk_l2_norm_in_kernel': did you mean use_qk_l2norm_in_kernel?"):
        chunk_kda(**inputs(False), use_qk_l2_norm_in_kernel=True)
    with pytest.raises(TypeError, match="'transpose_state_layout': did you mean state_v_first?"):
        chunk_kda(**inputs(False), transpose_state_layout=True)


@pytest.mark.parametrize("function, wrong, hint", [
    (kda.forward, "use_qk_l2norm_in_kernel", r"here that is options=Options\(qk_l2norm=...\); kda_engine.compat"),
    (kda.forward, "state_v_first", r'here that is options=Options\(state_layout="VK"\)'),
    (kda.forward, "gate", r"did you mean options=Options\(gate=...\)\?"),
    (kda.forward, "h0", r"did you mean initial_state\?"),
    (kda.forward, "intial_state", r"did you mean initial_state\?"),
    (kda.forward, "output_final_state", "not needed here, the final state is always handed out"),
    (kda.forward, "zzz", "expected q, k, v, g, beta, A_log"),
    (kda.backward, "do", r"did you mean d_out\?"),
    (kda.backward, "gate", "expected fwd, d_out, d_final_state"),
    (kda.summarize, "lower_bound", r"did you mean options=Options\(lower_bound=...\)\?"),
    (kda.step, "h0", r"did you mean state\?"),
    (kda.short_conv, "weights", r"did you mean weight\?"),
    (kda.Options, "use_gate_in_kernel", 'here that is gate="lower_bound" or "softplus"'),
    (kda.Options, "qk_norm", r"did you mean qk_l2norm\?"),
])
def test_the_engines_own_calls_suggest_the_right_name(function, wrong, hint):
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument '{wrong}': {hint}"):
        function(**{wrong: 1})


def test_hints_leave_signatures_as_they_are():
    assert list(inspect.signature(kda.forward).parameters)[:5] == ["q", "k", "v", "g", "beta"]
    assert list(inspect.signature(kda.Options).parameters)[0] == "gate"
    assert kda.forward.__doc__.startswith("KDA forward.") and kda.Options(gate="log") == kda.Options("log")
