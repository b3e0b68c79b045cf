"""What a Kimi Delta Attention layer feeds its operator, from the bytes of a text: projections seeded, not trained.

Bytes repeat, so keys do: with the short convolution of width 4, every four-byte string has one key of its own.
"""

import numpy as np

from .cases import CONV_WIDTH, Case, Convolution, float_type
from .errors import InputError
from .options import Options

# The usual initial decay of such layers: rates in [1, 16], time steps log-uniform in this range.
LARGEST_RATE = 16
TIME_STEPS = (1e-3, 1e-1)


def project(text, heads=4, value_heads=None, K=64, V=64, dtype="float32", seed=0):
    """The `Case` named "text": one sequence, gate "softplus", beta "logit", forward and backward, with convolution.

    text: bytes, one token each. hidden = RMS-normalised embedding of the byte (heads * K channels); q, k, v and beta
    linear in it, g through a bottleneck of K channels; weights uniform within 1/sqrt(fan-in). d_out ~ N(0,1).
    Raises InputError for sizes or a dtype that cannot be.
    """
    value_heads = heads if value_heads is None else value_heads
    for name, number in {"heads": heads, "value_heads": value_heads, "K": K, "V": V}.items():
        if number < 1:
            raise InputError(f"{name}: expected at least 1, got {number}")
    if seed < 0:
        raise InputError(f"seed: expected at least 0, got {seed}")
    if value_heads % heads:
        raise InputError(f"value_heads: expected a multiple of {heads} heads, got {value_heads}")
    dtype = float_type(dtype)
    wide = np.dtype("f8" if dtype == np.float64 else "f4")
    random = np.random.default_rng(seed)
    # A token's projections depend on its byte alone: one row per byte is all there is to compute.
    hidden = random.standard_normal((256, heads * K), dtype="f4")
    hidden /= np.sqrt((hidden**2).mean(axis=1, keepdims=True) + np.float32(1e-6))

    def weights(*shape):
        bound = shape[-1] ** -0.5
        return random.uniform(-bound, bound, shape).astype("f4")

    def linear(x, channels):
        return x @ weights(channels, x.shape[1]).T

    rows = {"q": linear(hidden, heads * K), "k": linear(hidden, heads * K), "v": linear(hidden, value_heads * V),
            "g": linear(linear(hidden, K), value_heads * K), "beta": linear(hidden, value_heads)}
    shapes = {"q": (heads, K), "k": (heads, K), "v": (value_heads, V), "g": (value_heads, K), "beta": (value_heads,)}
    tokens = np.frombuffer(text, np.uint8)
    per_token = {name: x.reshape((256,) + shapes[name]).astype(dtype)[tokens] for name, x in rows.items()}
    time_step = np.exp(random.uniform(*np.log(TIME_STEPS), (value_heads, K)))
    return Case(
        name="text", **per_token,
        A_log=np.log(random.uniform(1, LARGEST_RATE, value_heads)).astype("f4").astype(wide),
        # softplus(dt_bias) = time_step
        dt_bias=(time_step + np.log(-np.expm1(-time_step))).astype("f4").astype(wide),
        conv=Convolution("silu", {name: weights(rows[name].shape[1], CONV_WIDTH).astype(wide) for name in "qkv"}, {}),
        d_out=random.standard_normal((len(tokens), value_heads, V), dtype="f4").astype(dtype),
        cu_seqlens=None, initial_state=None, d_final_state=None,
        options=Options(gate="softplus"), repeated_keys=False,
    )
