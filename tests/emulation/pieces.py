"""Sequences cut into pieces, as the chain's plan cuts them: states and transitions of the pieces, folded in float32."""

import numpy as np

from .chunks import CHUNK
from .records import TILE_CHUNKS


class Pieces:
    """starts, lengths [pieces]; sequence [pieces]; first, last [pieces]: whether of its sequence.

    most: chunks of a piece at most, None for whole sequences. A piece starts with an even chunk of its sequence.
    """

    def __init__(self, cu_seqlens, most=None):
        starts, lengths, sequence = [], [], []
        for n, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:])):
            size = stop - start if most is None else CHUNK * TILE_CHUNKS * -(-most // TILE_CHUNKS)
            cuts = [int(start)] if start == stop else range(int(start), int(stop), int(size))
            starts += cuts
            lengths += [min(int(size), int(stop) - at) for at in cuts]
            sequence += [n] * len(cuts)
        self.starts, self.lengths = np.array(starts, "i8"), np.array(lengths, "i8")
        self.sequence = np.array(sequence, int)
        change = np.diff(self.sequence) != 0
        self.first = np.append(True, change)[: len(starts)]
        self.last = np.append(change, True)[: len(starts)]

    @property
    def cut(self):
        return not self.first.all()

    def enter(self, initial, transitions, reached):
        """The state [pieces,HV,K,V] in which each piece begins; reached: what each leaves from zero, the first from the
        true state [N,HV,K,V].
        """
        entering = np.empty(reached.shape, "f4")
        for i in range(len(self.starts)):
            entering[i] = initial[self.sequence[i]] if self.first[i] else left
            left = reached[i] if self.first[i] else reached[i] + transitions[i] @ left
        return entering

    def enter_back(self, final, transitions, reached):
        """The same for the gradients, from the last piece to the first."""
        entering = np.empty(reached.shape, "f4")
        for i in reversed(range(len(self.starts))):
            entering[i] = final[self.sequence[i]] if self.last[i] else left
            left = reached[i] if self.last[i] else reached[i] + np.swapaxes(transitions[i], -1, -2) @ left
        return entering

    def zeros_but(self, which, states):
        """The states of the pieces `which`, zeros for the others."""
        begin = np.zeros((len(self.starts),) + states.shape[1:], "f4")
        begin[which] = states[self.sequence[which]]
        return begin
