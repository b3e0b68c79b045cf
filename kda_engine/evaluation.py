"""A whole case through one engine in one process, short convolution included: how goldens are made and checked."""

from dataclasses import replace

import numpy as np

from .api import backward, forward
from .conv import short_conv, short_conv_backward


def evaluate(case, engine):
    """All results of a `cases.Case` by their dataset names ("outputs/out", "grads/dq", "grads/conv/dq_weight", ...).

    Tensors that the operator does not give (a parameter's gradient without the parameter; all gradients when the case
    has no d_out) are left out. Types and shapes as the file schema has them.
    """
    through = {}
    if case.conv is not None:
        for name, weight in case.conv.weights.items():
            through[name] = (getattr(case, name), weight, case.conv.biases.get(name), case.conv.activation,
                             case.cu_seqlens)
    inputs = {name: short_conv(*through[name]) if name in through else getattr(case, name) for name in ("q", "k", "v")}
    fwd = forward(**inputs, g=case.g, beta=case.beta, A_log=case.A_log, dt_bias=case.dt_bias, options=case.options,
                  initial_state=case.initial_state, cu_seqlens=case.cu_seqlens, engine=engine)
    results = {"outputs/out": fwd.out, "outputs/final_state": fwd.final_state}
    if case.d_out is None:
        return results
    grads = vars(backward(fwd, case.d_out, case.d_final_state))
    for name, conv in through.items():
        dx, dweight, dbias, _ = short_conv_backward(grads[f"d{name}"], *conv)
        grads |= {f"d{name}": dx, f"conv/d{name}_weight": dweight, f"conv/d{name}_bias": dbias}
    return results | {f"grads/{name}": x for name, x in grads.items() if x is not None}


def reference(case):
    """The results of the float64 recurrence on the case's exact values, rounded once, to float32 or float64.

    float64 when any array of the case is, else float32: narrower types would hide the errors of those who are compared.
    """
    arrays = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "d_out", "d_final_state")
    given = {name: getattr(case, name) for name in arrays if getattr(case, name) is not None}
    kept = np.dtype("f8" if any(x.dtype == np.float64 for x in given.values()) else "f4")
    wide = lambda parts: {name: x.astype("f8") for name, x in parts.items()}
    conv = case.conv and replace(case.conv, weights=wide(case.conv.weights), biases=wide(case.conv.biases))
    results = evaluate(replace(case, conv=conv, **wide(given)), "reference")
    return {name: x.astype(kept) for name, x in results.items()}
