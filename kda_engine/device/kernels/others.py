"""The kernels beside the operator: the short convolution, and what decay decisions look at."""

from .table import ACTIVATION, ELEMENTS, SIZES, Kernel, element_variant, integers, pointers, reals, tiles

# Warps of one block of `decay_bounds`, each of which works alone.
DECAY_WARPS = 8

# Channels of one block of `short_conv` and its backward.
CONV_COLUMNS = 128


KERNELS = (
    Kernel(
        "short_conv", "kernels/short_conv.cu",
        pointers("x", "weight", "bias", "halo", "cu_seqlens", "chunk_offsets")
        + integers("sequences", "channels", "taps", "silu") + pointers("y"),
        variants=lambda target: [element_variant(element) for element in ELEMENTS],
        threads=lambda variant: CONV_COLUMNS,
        shared=lambda variant: 0,
        blocks=lambda a: a["count"] * tiles(a["channels"], CONV_COLUMNS),
    ),
    Kernel(
        "short_conv_backward", "kernels/short_conv_backward.cu",
        pointers("dy", "x", "weight", "bias", "halo", "bounds", "chunk_offsets")
        + integers("sequences", "channels", "taps", "silu") + pointers("dx", "dhalo", "partials"),
        variants=lambda target: [element_variant(element) for element in ELEMENTS],
        threads=lambda variant: CONV_COLUMNS,
        shared=lambda variant: 0,
        blocks=lambda a: a["count"] * tiles(a["channels"], CONV_COLUMNS),
    ),
    Kernel(
        "decay_bounds", "kernels/decay_bounds.cu",
        pointers("q", "k", "v", "g", "beta", "A_log", "dt_bias") + integers("tokens", "key_heads") + SIZES
        + integers("gate_form", "beta_form", "qk_l2norm", "quantity", "chunks_per_row") + reals("lower_bound")
        + pointers("logs", "added"),
        variants=lambda target: [element_variant(element) for element in ELEMENTS],
        threads=lambda variant: 32 * DECAY_WARPS,
        shared=lambda variant: 0,
        blocks=lambda a: tiles(a["count"] * a["value_heads"], DECAY_WARPS),
    ),
)
