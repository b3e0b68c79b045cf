"""Cases of the gates `softplus` and `log` by how far a token decays."""

from dataclasses import replace

import numpy as np

from kda_engine import cases


def gated(form, reach, dtype, least=0.0, **sizes):
    """Case "strong" with log decays from -1e-6 to -reach, of every size equally many, but one head stays below 1e-3; all
    of them beyond -least.
    """
    case = cases.make("strong", dtype=dtype, K=128, V=128, **sizes)
    random = np.random.default_rng(int(reach * 10))
    decay = 10 ** random.uniform(-6, np.log10(reach), case.g.shape)
    decay[:, 0] = np.minimum(decay[:, 0], 1e-3)
    return decaying(case, form, decay + least)


def spanning(form, nats, dtype, tokens=(), channels=slice(None), size=100, **sizes):
    """Case "strong" of `size` tokens in which those channels decay by `nats` in every chunk of 16, shared by these of its
    tokens, or (none given) by all; the rest by 1e-3 a token.
    """
    case = cases.make("strong", dtype=dtype, K=128, V=128, tokens=size, **sizes)
    strong = np.isin(np.arange(len(case.g)) % 16, tokens or range(16))
    decay = np.full(case.g.shape, 1e-3)
    decay[:, :, channels] = np.where(strong, nats / len(tokens or range(16)), 1e-3)[:, None, None]
    return decaying(case, form, decay)


def lone(form, nats):
    """(case "strong" in bfloat16 in which single tokens decay by `nats` in all channels and the others by up to 2e-3, the
    numbers of the single tokens).
    """
    case = cases.make("strong", dtype="bfloat16", tokens=128, heads=2, K=128, V=128)
    decay = 1e-3 * np.random.default_rng(0).uniform(0.1, 2, case.g.shape)
    tokens = np.arange(13, 128, 32)
    decay[tokens] = nats
    return decaying(case, form, decay), tokens


def decaying(case, form, decay):
    """The case with a gate form, and these log decays turned positive."""
    options = replace(case.options, gate=form)
    if form == "log":
        return replace(case, g=(-decay).astype(case.g.dtype), A_log=None, dt_bias=None, options=options)
    # softplus(x) = y at x = y + log(1 - e^-y).
    y = decay / np.exp(case.A_log)[:, None]
    return replace(case, g=(y + np.log(-np.expm1(-y)) - case.dt_bias).astype(case.g.dtype), options=options)
