"""The gates of all heads as the chains and the gradients sum them: float16 units of a decay.

Kernels: `Gates`, `GateAdjoint` and `Strength` of the fused kernels.
"""

from dataclasses import dataclass

import numpy as np

from .constants import constant, constants
from .formats import ex2, fma, rcp, to_float16, to_float16_saturated

LOG2_E = np.float32(constant("kLog2E"))


@dataclass(frozen=True)
class Gates:
    """rate, bias [HV,1], [HV,K]: g and dt_bias enter times rate. unit: log2 decay of one unit. A [HV,1]: exp(A_log)."""

    form: str
    lower_bound: np.float32
    A: np.ndarray
    dt_bias: np.ndarray

    @classmethod
    def of(cls, operands, options):
        heads, K = operands.value_heads, operands.K
        A, bias = np.ones((heads, 1), "f4"), np.zeros((heads, K), "f4")
        if operands.A_log is not None:
            with np.errstate(over="ignore"):
                A = np.exp(operands.A_log.astype("f4"))[:, None]
                A[A > np.float32(1e27)] = 1e27
        if operands.dt_bias is not None:
            bias = operands.dt_bias.astype("f4")
        return cls(options.gate, np.float32(options.lower_bound), A, bias)

    @property
    def bounded(self):
        return self.form == "lower_bound"

    @property
    def scale(self):
        return np.float32(constant("kGateScale", self.bounded))

    @property
    def unit(self):
        return self.lower_bound * LOG2_E / self.scale if self.bounded else np.float32(-1) / self.scale

    @property
    def missing(self):
        """Raw g of a token that decays nothing."""
        return np.float32(0 if self.form == "log" else -np.inf)

    def argument(self, g):
        """Raw g [...,HV,tokens,K] with dt_bias and rate, by whose power of 2 the gate goes."""
        rate = np.asarray(-LOG2_E * np.maximum(self.A, np.float32(1e-30)) if self.bounded else LOG2_E)
        return fma(g, rate[..., None], (rate * self.dt_bias)[:, None])

    def units(self, g):
        """float16 units of raw g [...,HV,tokens,K] (float32)."""
        with np.errstate(invalid="ignore", over="ignore"):
            if self.form == "log":
                return to_float16_saturated(g * (-LOG2_E * self.scale))
            x = self.argument(g)
            if self.bounded:
                one = 1 / self.scale
                return to_float16(rcp(fma(ex2(x), one, one)))
            return to_float16_saturated((self.A * self.scale)[..., None] * softplus(x))

    def adjoint(self, d, g):
        """(gradient of raw g, of A_log by token and channel) from that of the log decay; all [...,HV,tokens,K]."""
        if self.form == "log":
            return d, np.zeros_like(d)
        A = self.A[..., None]
        with np.errstate(over="ignore", invalid="ignore"):
            x = self.argument(g)
            small = ex2(-np.abs(x))
            share = rcp(1 + small)
            if self.form == "softplus":
                return (-A * d * np.where(x < 0, small * share, share),
                        np.where(d == 0, np.float32(0), -A / LOG2_E * d * softplus(x)))
            dx = d * (small * share * share)
            return A * self.lower_bound * dx, np.where(dx == 0, np.float32(0), -self.lower_bound / LOG2_E * dx * x)


def softplus(x):
    """log2(1 + 2^x) = max(x, 0) + log2(1 + 2^-|x|), the second by a polynomial."""
    small = ex2(-np.abs(x))
    first, *powers = reversed(constants("kSoftplus"))
    series = np.broadcast_to(first, x.shape)
    for power in powers:
        series = fma(series, small, power)
    return fma(small, series, np.fmax(x, 0))


def activate_beta(beta, form):
    """float32 β of raw β, as the preparation makes it."""
    strongest = np.float32(2 if form == "logit2" else 1)
    return strongest * rcp(1 + ex2(-LOG2_E * beta))


def beta_adjoint(along, beta):
    """Gradient of raw β from `along`, the gradient of β times β."""
    return along * rcp(1 + ex2(LOG2_E * beta))
