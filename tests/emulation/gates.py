"""The gates of all heads as the chains and the gradients sum them: float16 units of a decay.

Kernels: `Gates` of the fused kernels, and common/gate_adjoint.cuh.
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

    def units(self, g):
        """float16 units of raw g [...,HV,tokens,K] (float32)."""
        with np.errstate(invalid="ignore", over="ignore"):
            if self.form == "log":
                return to_float16_saturated(g * (-LOG2_E * self.scale))
            rate = -LOG2_E * np.maximum(self.A, np.float32(1e-30)) if self.bounded else LOG2_E
            x = fma(g, np.asarray(rate)[..., None], (rate * self.dt_bias)[:, None])
            if self.bounded:
                one = 1 / self.scale
                return to_float16(rcp(fma(ex2(x), one, one)))
            # log2(1 + 2^x) = max(x, 0) + log2(1 + 2^-|x|), the second by a polynomial.
            small = ex2(-np.abs(x))
            first, *powers = reversed(constants("kSoftplus"))
            series = np.broadcast_to(first, x.shape)
            for power in powers:
                series = fma(series, small, power)
            gain = np.minimum(self.A * self.scale, np.float32(1e30))[..., None]
            return to_float16_saturated(gain * fma(small, series, np.fmax(x, 0)))

    def adjoint(self, d, g):
        """(gradient of raw g, of A_log by token and channel) from that of the log decay; all [...,HV,tokens,K]."""
        A, bias = self.A[..., None], self.dt_bias[:, None]
        if self.form == "log":
            return d, np.zeros_like(d)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.form == "softplus":
                x = g + bias
                log_decay = -A * (np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))
                return -A * (1 / (1 + np.exp(-x))) * d, np.where(d == 0, np.float32(0), d * log_decay)
            x = A * (g + bias)
            small = np.exp(-np.abs(x))
            dx = d * self.lower_bound * (small / ((1 + small) * (1 + small)))
            return A * dx, np.where(dx == 0, np.float32(0), dx * x)


def activate_beta(beta, form):
    """float32 β of raw β, as the preparation makes it."""
    strongest = np.float32(2 if form == "logit2" else 1)
    return strongest * rcp(1 + ex2(-LOG2_E * beta))


def beta_adjoint(d, beta, form):
    with np.errstate(invalid="ignore"):
        small = np.exp(-np.abs(beta))
        slope = small / ((1 + small) * (1 + small))
        return d * (np.float32(2) * slope if form == "logit2" else slope)
