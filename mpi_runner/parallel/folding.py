"""Results whose bits do not depend on the ranks: every sequence in pieces of one length, folded in their order.

The pieces lie on a grid of the sequence's own, and their length depends on the whole problem alone. Each piece is
condensed and computed by calls of its own. The state at every piece's end is M S_in + S of that piece, one after the
other from the sequence's true state, whichever rank holds it; gradients likewise. What all tokens share is summed by
piece, in the pieces' order.
"""

from dataclasses import dataclass, field

import numpy as np

from kda_engine.affine import Affine
from kda_engine.engines import Forward, Saved
from kda_engine.gate import Gradients

PER_TOKEN = ("q", "k", "v", "g", "beta")

# Tokens of a piece: a power of two times the first, as few as keep the whole problem within so many pieces.
SHORTEST, LONGEST, MOST_PIECES = 32, 4096, 256


def piece_length(tokens):
    """Tokens of a piece, for a problem of so many tokens on all ranks."""
    length = SHORTEST
    while length < LONGEST and length * MOST_PIECES < tokens:
        length *= 2
    return length


def cut(cu_seqlens, length):
    """The pieces of sequences, a list [(start, stop) ...] for each; none of an empty one."""
    return [[(at, min(at + length, int(stop))) for at in range(int(start), int(stop), length)]
            for start, stop in zip(cu_seqlens, cu_seqlens[1:])]


@dataclass
class Folded:
    """What a forward keeps of its pieces, by sequence: their spans, their `Affine`s, the engine's own `Saved`, and the
    data terms D of their gradients once those are known."""

    spans: list
    steps: list
    saved: list
    d_steps: list | None = field(default=None)


class FoldingEngine:
    """An engine on the host that computes piece by piece, as this module says.

    Its `Gradients` hold dA_log [pieces,HV] and ddt_bias [pieces,HV,K], a row a piece, in the pieces' order.
    """

    def __init__(self, engine, length):
        self._engine, self._length = engine, length
        engine.fix_sums()
        self.name, self.measure, self.poll = engine.name, engine.measure, engine.poll
        self.take, self.take_array = engine.take, engine.take_array
        self._known = {}

    def steps(self, operands, options):
        """The `Affine`s of all pieces, a list for each sequence; kept for the forward of the same operands."""
        if id(operands) not in self._known:
            self._known[id(operands)] = operands, [
                [self._summarise(operands.slice_tokens(*span), options) for span in spans]
                for spans in cut(operands.cu_seqlens, self._length)]
        return self._known[id(operands)][1]

    def d_steps(self, saved, d_out):
        """The same of the gradients behind a forward, in the order of the tokens; D stands for S and M^T for M."""
        folded, operands = saved.states, saved.operands
        if folded.d_steps is None:
            zeros = np.zeros((1, *operands.state_shape[1:]), operands.state_dtype)
            folded.d_steps = [
                [Affine(np.swapaxes(step.M, -1, -2),
                        self._engine.summarise_backward(operands.slice_tokens(a, b), saved.options, d_out[a:b], zeros)[0])
                 for (a, b), step in zip(spans, steps)]
                for spans, steps in zip(folded.spans, folded.steps)]
        return folded.d_steps

    def forward(self, operands, options, initial_state, save):
        """As `Engine.forward`."""
        steps, spans = self.steps(operands, options), cut(operands.cu_seqlens, self._length)
        del self._known[id(operands)]
        out, final_state = np.empty_like(operands.v), initial_state.copy()
        kept = []
        for n, (of_sequence, pairs) in enumerate(zip(spans, steps)):
            state, saves = initial_state[n], []
            for (a, b), pair in zip(of_sequence, pairs):
                result = self._engine.forward(operands.slice_tokens(a, b), options, state[None], save)
                out[a:b] = result.out
                saves.append(result.saved)
                state = pair.apply(state)
            final_state[n] = state
            kept.append(saves)
        saved = Saved(operands, options, initial_state, Folded(spans, steps, kept)) if save else None
        return Forward(out, final_state, saved)

    def backward(self, saved, d_out, d_final_state):
        """As `Engine.backward`, but for the rows of dA_log and ddt_bias."""
        operands, folded = saved.operands, saved.states
        d_steps, d_initial_state = self.d_steps(saved, d_out), d_final_state.copy()
        tokens = {name: np.empty_like(getattr(operands, name)) for name in PER_TOKEN}
        count, HV, K = sum(map(len, folded.spans)), operands.value_heads, operands.K
        dA_log, ddt_bias = np.zeros((count, HV)), np.zeros((count, HV, K))
        row = count
        for n in reversed(range(operands.sequences)):
            d_state = d_final_state[n]
            for (a, b), pair, kept in reversed(list(zip(folded.spans[n], d_steps[n], folded.saved[n]))):
                row -= 1
                d = self._engine.backward(kept, d_out[a:b], d_state[None])
                for name in PER_TOKEN:
                    tokens[name][a:b] = getattr(d, f"d{name}")
                dA_log[row], ddt_bias[row] = d.dA_log, d.ddt_bias
                d_state = pair.apply(d_state)
            d_initial_state[n] = d_state
        return Gradients(**{f"d{name}": x for name, x in tokens.items()}, dA_log=dA_log, ddt_bias=ddt_bias,
                         d_initial_state=d_initial_state)

    def _summarise(self, operands, options):
        zeros = np.zeros((1, *operands.state_shape[1:]), operands.state_dtype)
        pair = self._engine.summarise(operands, options, zeros, transition=True)
        return Affine(pair.M[0], pair.S[0])
