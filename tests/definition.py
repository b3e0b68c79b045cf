"""The operator written once more from its definition, analytic so that complex steps differentiate it exactly.

Shares no code with kda_engine. Every array may carry a leading axis of variants: a whole gradient costs one sweep.
"""

import numpy as np

# A complex step of this size gives derivatives exact to rounding: there is no difference to cancel.
STEP = 1e-40

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    above = x.real > 0
    small = np.exp(np.where(above, -x, x))
    # NumPy's complex log1p loses small real parts; beside a step of 1e-40 the first order is exact.
    return np.where(above, x, 0) + np.log1p(small.real) + 1j * small.imag / (1 + small.real)


def forward(x, options, lengths):
    """(out [P,T,HV,V], final_state [P,N,HV,K,V]) from a dict of complex arrays, each with the leading axis P."""
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    T, (HV, K) = q.shape[1], g.shape[2:]
    reader = np.arange(HV) // (HV // q.shape[2])
    q, k = q[:, :, reader], k[:, :, reader]
    if options.qk_l2norm:
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6)
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    a = np.exp(x["A_log"])[:, None, :, None]
    biased = g + x["dt_bias"][:, None]
    log_decay = {"log": lambda: g, "softplus": lambda: -a * softplus(biased),
                 "lower_bound": lambda: options.lower_bound * sigmoid(a * biased)}[options.gate]()
    beta = {"value": lambda: beta, "logit": lambda: sigmoid(beta), "logit2": lambda: 2 * sigmoid(beta)}[options.beta]()
    scale = K**-0.5 if options.scale is None else options.scale
    out, final_state = np.zeros(v.shape, complex), x["initial_state"].copy()
    t = 0
    for n, length in enumerate(lengths):
        S = final_state[:, n]
        for _ in range(length):
            S = np.exp(log_decay[:, t])[..., None] * S
            u = beta[:, t][..., None] * (v[:, t] - np.einsum("phkv,phk->phv", S, k[:, t]))
            S = S + np.einsum("phk,phv->phkv", k[:, t], u)
            out[:, t] = scale * np.einsum("phkv,phk->phv", S, q[:, t])
            t += 1
        final_state[:, n] = S
    assert t == T
    return out, final_state


def tensors(case):
    """The results of a float64 case, KV layout, under the names of `oracle.run`; gradients by complex steps."""
    HV, K, V = case.v.shape[1], case.k.shape[2], case.v.shape[2]
    state = (len(case.lengths), HV, K, V)
    absent = {"A_log": np.zeros(HV), "dt_bias": np.zeros((HV, K)), "initial_state": np.zeros(state)}
    given = {name: getattr(case, name) for name in INPUTS}
    x = {name: absent[name] if value is None else value for name, value in given.items()}
    d_final_state = np.zeros(state) if case.d_final_state is None else case.d_final_state
    result = {}
    out, final_state = forward({name: value[None].astype(complex) for name, value in x.items()}, case.options,
                               case.lengths)
    result["out"], result["final_state"] = out[0].real, final_state[0].real
    for name in INPUTS:
        gradient = "d_initial_state" if name == "initial_state" else "d" + name
        if given[name] is None and name != "initial_state":
            result[gradient] = None
            continue
        size = x[name].size
        steps = np.eye(size).reshape((size,) + x[name].shape) * (1j * STEP)
        varied = {key: value[None].astype(complex) for key, value in x.items()}
        # Addition would turn an infinite real part's imaginary one into NaN on some platforms; set the parts apart.
        varied[name] = np.broadcast_to(x[name], steps.shape).astype(complex)
        varied[name].imag = steps.imag
        widest = {key: np.broadcast_to(value, (size,) + value.shape[1:]) for key, value in varied.items()}
        out, final_state = forward(widest, case.options, case.lengths)
        loss = (out.imag * case.d_out).sum((1, 2, 3)) + (final_state.imag * d_final_state).sum((1, 2, 3, 4))
        result[gradient] = loss.reshape(x[name].shape) / STEP
    return result
