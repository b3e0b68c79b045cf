"""The kernels of the portable path and of decoding."""

from dataclasses import dataclass

from ...layout import CHUNK
from .table import ACTIVATION, ELEMENTS, SIZES, Kernel, integers, pointers, tiles

# Numbers of channels that kernels are compiled for; a K in between is padded inside the kernels.
KEY_SIZES = (64, 128, 256)
LARGEST_SIZE = KEY_SIZES[-1]

# Columns of one block: of `forward` and `summary`, of the backward's kernels, `scan` and `step`; each kernel's header
# gives the reason.
WIDE_COLUMNS = 128
TILE_COLUMNS = 64
SCAN_COLUMNS = 16
STEP_COLUMNS = 128

@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for. element: a key of ELEMENTS; key_size: one of KEY_SIZES; stages: records in flight."""

    element: str
    key_size: int
    stages: int

    @property
    def record(self):
        """Floats of one chunk's prepared operands (kernels_cu/tile/portable/operands.cuh)."""
        return 3 * CHUNK * self.key_size + self.key_size + 2 * CHUNK * CHUNK

    @property
    def turned_record(self):
        """Floats of the same in shared memory as the backward wants it (kernels_cu/tile/portable/backward_pipe.cuh)."""
        return CHUNK * (3 * self.key_size + 16) + self.key_size + 2 * CHUNK * (CHUNK + 4)

    @property
    def defines(self):
        """(name, value) pairs for the compiler."""
        return (("KDA_CHUNK", CHUNK), ("KDA_ELEMENT", ELEMENTS[self.element]), ("KDA_KEY_SIZE", self.key_size),
                ("KDA_STAGES", self.stages))


def variant(element, K, target):
    """The Variant for an element type and a key size up to LARGEST_SIZE on a target."""
    key_size = next(size for size in KEY_SIZES if K <= size)
    single = Variant(element, key_size, 1)
    fits_twice = 2 * 4 * single.record <= target.shared_limit
    return Variant(element, key_size, 2 if fits_twice else 1)


def _general(target):
    """The variants of the portable kernels."""
    return [variant(element, K, target) for element in ELEMENTS for K in KEY_SIZES]


_CHAIN = (pointers("records", "v", "initial", "cu_seqlens", "chunk_offsets", "span_chunks", "span_sequences")
          + integers("spans") + SIZES)


def _chain_blocks(arguments):
    return arguments["count"] * arguments["value_heads"] * tiles(arguments["value_size"], TILE_COLUMNS)


def _chain_shared(variant):
    return 4 * variant.stages * variant.record


def _token_gradients_shared(variant):
    passing = 3 * max(TILE_COLUMNS + 16, variant.key_size + 8)
    return 4 * CHUNK * (passing + 2 * (variant.key_size + 8))


KERNELS = (
    Kernel(
        "prepare", "kernels/prepare.cu",
        pointers("q", "k", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "chunk_offsets")
        + integers("sequences", "key_heads", "value_heads", "key_size") + ACTIVATION + pointers("records"),
        variants=_general,
        threads=lambda variant: 128,
        shared=lambda variant: 4 * 3 * CHUNK * (variant.key_size + 8),
        blocks=lambda a: a["count"] * a["value_heads"],
    ),
    Kernel(
        "forward", "kernels/forward.cu", _CHAIN + pointers("out", "final"),
        variants=_general,
        threads=lambda variant: 2 * WIDE_COLUMNS,
        shared=_chain_shared,
        blocks=lambda a: a["count"] * a["value_heads"] * tiles(a["value_size"], WIDE_COLUMNS),
    ),
    Kernel(
        "summary", "kernels/summary.cu", _CHAIN + pointers("transition", "reached"),
        variants=_general,
        threads=lambda variant: 2 * WIDE_COLUMNS,
        shared=_chain_shared,
        blocks=lambda a: a["count"] * a["value_heads"] * (
            tiles(a["value_size"], WIDE_COLUMNS)
            + (tiles(a["key_size"], WIDE_COLUMNS) if a["transition"] else 0)),
    ),
    Kernel(
        "scan", "kernels/scan.cu",
        pointers("transition", "reached", "initial", "sequence_spans") + SIZES + pointers("states"),
        variants=_general,
        threads=lambda variant: variant.key_size,
        shared=lambda variant: 0,
        blocks=lambda a: a["count"] * a["value_heads"] * tiles(a["value_size"], SCAN_COLUMNS),
    ),
    Kernel(
        "step", "kernels/step.cu",
        pointers("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial", "cu_seqlens") + integers("key_heads")
        + SIZES + ACTIVATION + pointers("out", "final"),
        variants=_general,
        threads=lambda variant: 2 * variant.key_size,
        shared=lambda variant: 0,
        blocks=lambda a: a["count"] * a["value_heads"] * tiles(a["value_size"], STEP_COLUMNS),
    ),
    Kernel(
        "backward_states", "kernels/backward_states.cu", _CHAIN + pointers("states", "writes"),
        variants=_general,
        threads=lambda variant: 128,
        shared=_chain_shared,
        blocks=_chain_blocks,
    ),
    Kernel(
        "backward_sweep", "kernels/backward_sweep.cu",
        pointers("records", "d_out", "d_leaving", "cu_seqlens", "chunk_offsets", "span_chunks", "span_sequences")
        + integers("spans") + SIZES + pointers("d_entering", "d_states", "d_values"),
        variants=_general,
        threads=lambda variant: 128,
        shared=lambda variant: 4 * variant.stages * variant.turned_record,
        blocks=_chain_blocks,
    ),
    Kernel(
        "backward_tokens", "kernels/backward_tokens.cu",
        pointers("q", "k", "g", "beta", "A_log", "dt_bias", "d_out", "states", "writes", "d_states", "d_values",
                  "cu_seqlens", "chunk_offsets")
        + integers("sequences", "key_heads") + SIZES + ACTIVATION
        + pointers("dq", "dk", "dv", "dg", "dbeta", "d_bias", "d_rate"),
        variants=_general,
        threads=lambda variant: variant.key_size,
        shared=_token_gradients_shared,
        blocks=lambda a: a["count"] * a["key_heads"],
    ),
)
