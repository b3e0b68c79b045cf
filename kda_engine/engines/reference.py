"""The oracle as an engine: token recurrence in float64, any array module, whatever the inputs' types."""

from dataclasses import replace

from .. import reference
from ..affine import Affine
from ..arrays import array_module
from ..gate import Activated, Gradients, activate, activate_adjoint
from ..layout import zero_states
from .base import Engine, Forward, Saved


class ReferenceEngine(Engine):
    name = "reference"

    def summarise(self, operands, options, initial_state, transition):
        module, K, V = array_module(operands.k), operands.K, operands.V
        state = initial_state.astype("f8")
        if transition:
            identity = Affine.identity(state.shape[:2], K, V, "f8", module).M
            state = module.concatenate([state, identity], axis=3)
        for n, x in self._sequences(operands, options):
            v = x.v
            if transition:
                v = module.concatenate([v, module.zeros(v.shape[:2] + (K,), "f8")], axis=2)
            state[n] = reference.recur(replace(x, v=v), 1.0, state[n], poll=self.poll)
        state = state.astype(operands.state_dtype)
        return Affine(state[..., V:].copy() if transition else None, state[..., :V].copy())

    def forward(self, operands, options, initial_state, save):
        if initial_state is None:
            initial_state = zero_states(operands)
        module = array_module(operands.k)
        out = module.empty(operands.v.shape, "f8")
        state = initial_state.astype("f8")
        for n, x in self._sequences(operands, options):
            span = slice(*operands.cu_seqlens[n : n + 2])
            state[n] = reference.recur(x, options.scale_for(operands.K), state[n], out[span], self.poll)
        saved = Saved(operands, options, initial_state, None) if save else None
        return Forward(out.astype(operands.v.dtype), state.astype(operands.state_dtype), saved)

    def summarise_backward(self, operands, options, d_out, d_final_state):
        # The state's own value does not matter here; zeros serve.
        return self._adjoint(operands, options, d_final_state * 0, d_out, d_final_state)[1]

    def backward(self, saved, d_out, d_final_state):
        operands = saved.operands
        d, d_initial_state = self._adjoint(operands, saved.options, saved.initial_state, d_out, d_final_state)
        raw = activate_adjoint(d, operands, saved.options, "f8")
        typed = {"d" + name: getattr(raw, "d" + name).astype(getattr(operands, name).dtype)
                 for name in ("q", "k", "v", "g", "beta")}
        return Gradients(**typed, dA_log=raw.dA_log, ddt_bias=raw.ddt_bias, d_initial_state=d_initial_state)

    def _adjoint(self, operands, options, initial_state, d_out, d_final_state):
        module, scale = array_module(operands.k), options.scale_for(operands.K)
        T, HV, K, V = operands.tokens, operands.value_heads, operands.K, operands.V
        wide = lambda *tail: module.empty((T, HV) + tail, "f8")
        d = Activated(q=wide(K), k=wide(K), v=wide(V), log_decay=wide(K), beta=wide())
        d_state = d_final_state.astype("f8")
        for n, x in self._sequences(operands, options):
            span = slice(*operands.cu_seqlens[n : n + 2])
            part = Activated(*(x[span] for x in (d.q, d.k, d.v, d.log_decay, d.beta)))
            d_state[n] = reference.recur_adjoint(x, scale, initial_state[n].astype("f8"),
                                                 d_out[span].astype("f8"), d_state[n], part, self.poll)
        return d, d_state.astype(operands.state_dtype)

    def _sequences(self, operands, options):
        """Every sequence's index and activated tokens."""
        for n in range(operands.sequences):
            self.poll()
            start, stop = (int(at) for at in operands.cu_seqlens[n : n + 2])
            yield n, activate(operands.slice_tokens(start, stop), options, "f8")
