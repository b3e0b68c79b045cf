"""What raw g, beta, q and k mean, as the kernels are told."""

from dataclasses import dataclass
from functools import lru_cache

from ...options import BETAS, GATES


# Equal to itself only: what was prepared for it is found again at once.
@dataclass(frozen=True, eq=False)
class Activation:
    """An Options and a key size as numbers. gate_form, beta_form: places in GATES and BETAS; qk_l2norm: whether q and k
    are divided by their norms; lower_bound: of the gate of that name, nats a token; scale: the factor on q.
    """

    gate_form: int
    beta_form: int
    qk_l2norm: bool
    lower_bound: float
    scale: float

    @property
    def bounded(self):
        """Whether log decays have a bound, for which kernels are compiled of their own."""
        return GATES[self.gate_form] == "lower_bound"

    @property
    def arguments(self):
        """By the names of the kernels' parameters; a launch picks those that its kernel has."""
        return {"gate_form": self.gate_form, "beta_form": self.beta_form, "qk_l2norm": self.qk_l2norm,
                "lower_bound": self.lower_bound, "scale": self.scale}


@lru_cache(maxsize=64)
def activation(options, K):
    """The Activation of an Options and a key size; the last few are remembered."""
    return Activation(GATES.index(options.gate), BETAS.index(options.beta), options.qk_l2norm, options.lower_bound,
                      options.scale_for(K))
