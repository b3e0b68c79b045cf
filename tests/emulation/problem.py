"""One packed problem as the fused kernels take it: arrays by value head, float32 holding the inputs' type."""

from dataclasses import dataclass

import numpy as np

from kda_engine.arrays import BFLOAT16
from kda_engine.errors import InputError

from .gates import Gates

SIZE = 128


def covers(operands, options):
    """Whether the fused kernels take it, but for the device."""
    types = {x.dtype for x in (operands.q, operands.k, operands.v, operands.g, operands.beta)}
    return (operands.K == operands.V == SIZE and len(types) == 1 and types <= {BFLOAT16, np.dtype("f2")}
            and options.qk_l2norm and options.beta != "value")


@dataclass(frozen=True)
class Problem:
    """q, k, v, g [T,HV,128], beta [T,HV]; q and k are repeated for the value heads that share them."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    gates: Gates
    options: object
    dtype: np.dtype
    scale: np.float32
    group: int

    @classmethod
    def of(cls, operands, options):
        if not covers(operands, options):
            raise InputError("expected K = V = 128, one 16-bit type, the norm in the kernel and beta logit or logit2")
        group = operands.value_heads // operands.heads
        shared = np.arange(operands.value_heads) // group
        return cls(operands.q[:, shared], operands.k[:, shared], operands.v, operands.g, operands.beta,
                   Gates.of(operands, options), options, operands.v.dtype,
                   np.float32(options.scale_for(operands.K)), group)
