"""Affine maps of the state: what a chunk, a sub-segment or a rank's share does to the state that enters it.

S_out = M S_in + S. The same algebra serves every level, forward with M and backward with M transposed.
"""

from dataclasses import dataclass

from .arrays import array_module, brief


@dataclass(frozen=True)
class Affine:
    """M [...,K,K] and S [...,K,V]; leading axes (sequences, heads) are batch axes.

    M is None where the incoming state no longer matters: it is part of S already, or was dropped.
    """

    M: object
    S: object

    def __repr__(self):
        return f"Affine(M={brief(self.M)}, S={brief(self.S)})"

    @classmethod
    def identity(cls, lead, K, V, dtype, module):
        """The map that changes nothing, for the given leading axes."""
        M = module.zeros(tuple(lead) + (K, K), dtype)
        M[...] = module.eye(K, dtype=dtype)
        return cls(M, module.zeros(tuple(lead) + (K, V), dtype))

    def after(self, first):
        """The map that applies `first`, then this one: (M2 M1, M2 S1 + S2); both with M."""
        return Affine(self.M @ first.M, self.M @ first.S + self.S)

    def apply(self, state):
        """M state + S."""
        return self.S if self.M is None else self.M @ state + self.S

    def apply_transposed(self, d_state):
        """M^T d_state + S, for a pair that holds the backward's data term D in S."""
        return self.S if self.M is None else array_module(self.M).swapaxes(self.M, -1, -2) @ d_state + self.S
