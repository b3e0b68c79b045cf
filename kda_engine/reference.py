"""The oracle: the token recurrence in float64 and its hand-written adjoint. Nothing else defines the operator.

Per token and head, with log decay l, normalised q and k, activated beta:

    S <- Diag(e^l) S;   u = beta (v - S^T k);   S <- S + k u^T;   out = scale S^T q

Any array module; all heads of a sequence advance together.
"""

import math

from .arrays import array_module
from .gate import Activated


# Tokens between two calls of `poll`.
POLL_TOKENS = 256


def recur(x, scale, state, out=None, poll=lambda: None):
    """Advance `state` [HV,K,V] over the tokens of x (an `Activated` of one sequence); returns the final state.

    Writes out [T,HV,V] when given. poll is called now and then and may raise to stop.
    """
    module = array_module(state)
    decay = module.exp(x.log_decay)
    for t in range(len(x.k)):
        if t % POLL_TOKENS == 0:
            poll()
        state = decay[t][:, :, None] * state
        u = x.beta[t][:, None] * (x.v[t] - _read(state, x.k[t]))
        state = state + x.k[t][:, :, None] * u[:, None, :]
        if out is not None:
            out[t] = scale * _read(state, x.q[t])
    return state


def recur_adjoint(x, scale, initial_state, d_out, d_state, d, poll=lambda: None):
    """The adjoint of `recur`: fills `d` (an `Activated` of gradients), returns the gradient of the initial state.

    States are recomputed from checkpoints every sqrt(T) tokens, so memory grows with sqrt(T).
    """
    T = len(x.k)
    stride = max(1, math.isqrt(T))
    checkpoints = []
    state = initial_state
    for start in range(0, T, stride):
        checkpoints.append(state)
        state = recur(_tokens(x, start, min(start + stride, T)), scale, state, poll=poll)
    for start in reversed(range(0, T, stride)):
        poll()
        block = slice(start, min(start + stride, T))
        state = checkpoints.pop()
        d_state = _adjoint_block(_tokens(x, block.start, block.stop), scale, state, d_out[block], d_state,
                                 _tokens(d, block.start, block.stop))
    return d_state


def _adjoint_block(x, scale, state, d_out, d_state, d):
    decay = array_module(state).exp(x.log_decay)
    decayed, written = [], []
    for t in range(len(x.k)):
        faded = decay[t][:, :, None] * state
        error = x.v[t] - _read(faded, x.k[t])
        state = faded + x.k[t][:, :, None] * (x.beta[t][:, None] * error)[:, None, :]
        decayed.append(faded)
        written.append((error, state))
    for t in reversed(range(len(x.k))):
        (error, after), faded = written.pop(), decayed.pop()
        q, k, beta = x.q[t], x.k[t], x.beta[t][:, None]
        d.q[t] = scale * _write(after, d_out[t])
        d_after = d_state + scale * q[:, :, None] * d_out[t][:, None, :]
        du = _read(d_after, k)
        d.beta[t] = (du * error).sum(axis=-1)
        d_error = beta * du
        d.v[t] = d_error
        d.k[t] = _write(d_after, beta * error) - _write(faded, d_error)
        d_faded = d_after - k[:, :, None] * d_error[:, None, :]
        d.log_decay[t] = (d_faded * faded).sum(axis=-1)
        d_state = decay[t][:, :, None] * d_faded
    return d_state


def _read(state, row):
    """state^T row, per head: [HV,K,V], [HV,K] -> [HV,V]."""
    return (row[:, None, :] @ state)[:, 0, :]


def _write(state, column):
    """state column, per head: [HV,K,V], [HV,V] -> [HV,K]."""
    return (state @ column[:, :, None])[:, :, 0]


def _tokens(x, start, stop):
    cut = slice(start, stop)
    return Activated(x.q[cut], x.k[cut], x.v[cut], x.log_decay[cut], x.beta[cut])
