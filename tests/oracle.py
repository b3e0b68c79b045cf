"""Runs a case through an engine, short convolution included, and collects every result by its name."""

from dataclasses import replace

import kda_engine as kda


def arguments(case):
    """(positional, keyword) arguments of `kda_engine.forward` for a case without convolution."""
    return (case.q, case.k, case.v, case.g, case.beta), {
        "A_log": case.A_log, "dt_bias": case.dt_bias, "initial_state": case.initial_state,
        "cu_seqlens": case.cu_seqlens, "options": case.options}


def upcast(case):
    """The same values in float64."""
    wide = lambda x: None if x is None else x.astype("f8")
    conv = case.conv and replace(case.conv, weights={key: wide(x) for key, x in case.conv.weights.items()},
                                 biases={key: wide(x) for key, x in case.conv.biases.items()})
    arrays = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "d_out", "d_final_state")
    return replace(case, conv=conv, **{name: wide(getattr(case, name)) for name in arrays})


def run(case, engine):
    """Outputs and gradients of a case, None where there is none: out, final_state, dq ... d_initial_state.

    With a convolution, dq, dk and dv are those of its inputs and its own gradients are named dq_weight, dq_bias ...
    """
    through = {}
    if case.conv is not None:
        for name in ("q", "k", "v"):
            through[name] = (getattr(case, name), case.conv.weights[name], case.conv.biases.get(name),
                             case.conv.activation, case.cu_seqlens)
        case = replace(case, **{name: kda.short_conv(*given) for name, given in through.items()})
    given, options = arguments(case)
    fwd = kda.forward(*given, **options, engine=engine)
    grads = kda.backward(fwd, case.d_out, case.d_final_state)
    result = {"out": fwd.out, "final_state": fwd.final_state, **vars(grads)}
    for name, conv in through.items():
        d, d_weight, d_bias, _ = kda.short_conv_backward(result["d" + name], *conv)
        result.update({f"d{name}": d, f"d{name}_weight": d_weight, f"d{name}_bias": d_bias})
    return result


def assert_close(computed, expected, tolerance):
    """Every tensor within the relative Frobenius tolerance; both sides must have the same tensors."""
    assert computed.keys() == expected.keys()
    for name, value in expected.items():
        assert (computed[name] is None) == (value is None), name
        if value is None:
            continue
        error = kda.compare(computed[name], value)
        # NaN fails: it is not at most anything.
        assert error <= tolerance, f"{name}: error {error:.2e} above {tolerance:.0e}"
