"""The shapes and gate regimes that speed is measured on, inputs drawn by seed where they are used."""

import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..errors import InputError
from ..gate import softplus

# Head size of every measured shape.
HEAD_SIZE = 128

# Mean and deviation of the raw gate.
REGIMES = {"strong": (0.0, 1.0), "weak": (-6.0, 1.0)}


@dataclass(frozen=True)
class Shape:
    """lengths: tokens of each sequence. heads: H = HV."""

    lengths: tuple
    heads: int

    @property
    def tokens(self):
        return sum(self.lengths)

    @property
    def cu_seqlens(self):
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)


SHAPES = {
    "A": Shape((8192,), 96),
    "B": Shape((1024,) * 8, 96),
    "C": Shape((1300, 547, 2048, 963, 271, 3063), 96),
    "D": Shape((8192,), 64),
    "E": Shape((1024,) * 8, 64),
    "F": Shape((8192,), 16),
    "G": Shape((65536,), 16),
    "H": Shape((32768,), 32),
    "I": Shape((262144,), 4),
    "J": Shape((8192,) * 4, 32),
    "K": Shape((512,) * 32, 64),
    "L": Shape((1024,), 64),
}


def parse(text):
    """The Shape that a text names: a letter of SHAPES, TxH, or NxTxH for N sequences of T tokens. Raises InputError."""
    if text in SHAPES:
        return SHAPES[text]
    if not re.fullmatch(r"([1-9]\d*x){1,2}[1-9]\d*", text):
        raise InputError(f"shape: expected a letter of {', '.join(SHAPES)}, or TxH or NxTxH, got {text!r}")
    *sequences, tokens, heads = map(int, text.split("x"))
    return Shape((tokens,) * (sequences[0] if sequences else 1), heads)


def draw(shape, regime, gate="lower_bound", seed=0, dtype=ml_dtypes.bfloat16, module=None):
    """Inputs by name as `kda_engine.forward` takes them: q, k, v, g, beta, A_log, dt_bias, initial_state.

    regime: a key of REGIMES. gate: its form; log decays are drawn as `softplus` makes them from the same raw gates
    without parameters. States and parameters are float32. module: whose arrays, numpy or (None) cupy.
    """
    random, normal = _generator(module, seed)
    T, H, N, D = shape.tokens, shape.heads, len(shape.lengths), HEAD_SIZE
    mean, deviation = REGIMES[regime]
    shaped = (lambda x: -softplus(x)) if gate == "log" else lambda x: x
    return {
        "q": normal(T, H, D).astype(dtype), "k": normal(T, H, D).astype(dtype), "v": normal(T, H, D).astype(dtype),
        "g": shaped(mean + deviation * normal(T, H, D)).astype(dtype), "beta": normal(T, H).astype(dtype),
        "A_log": random.random(H, dtype="f4"), "dt_bias": random.random((H, D), dtype="f4"),
        "initial_state": 0.1 * normal(N, H, D, D),
    }


def draw_gradients(shape, seed=1, dtype=ml_dtypes.bfloat16, module=None):
    """What the backward takes beside them, by name as `kda_engine.backward` takes it: d_out, d_final_state."""
    _, normal = _generator(module, seed)
    T, H, N, D = shape.tokens, shape.heads, len(shape.lengths), HEAD_SIZE
    return {"d_out": normal(T, H, D).astype(dtype), "d_final_state": 0.1 * normal(N, H, D, D)}


def _generator(module, seed):
    if module is None:
        import cupy as module
    random = module.random.default_rng(seed)
    return random, lambda *size: random.standard_normal(size, dtype="f4")
