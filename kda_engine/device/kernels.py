"""The kernel table: every kernel, its file, what it is compiled for, its launch shape and its parameters."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..arrays import BFLOAT16
from ..layout import CHUNK

# Element types of per-token operands and the names their structs have in the kernels.
ELEMENTS = {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}

# The same by NumPy type.
ELEMENT_OF = {BFLOAT16: "bfloat16", np.dtype("f2"): "float16", np.dtype("f4"): "float32"}

# Numbers of channels that kernels are compiled for; a K in between is padded inside the kernels.
KEY_SIZES = (64, 128, 256)
LARGEST_SIZE = KEY_SIZES[-1]

# Columns of one block: of `forward` and `summary`, of the backward's kernels, `scan` and `step`; each kernel's header
# gives the reason.
WIDE_COLUMNS = 128
TILE_COLUMNS = 64
SCAN_COLUMNS = 16
STEP_COLUMNS = 128

# The fused chain: its K and V, the types it takes, the value columns a block of it may have, and its shared memory (the
# kernel asserts the figure). The shared memory of the gradients. What the fold over cut sequences has of columns and
# shared memory.
CHAIN_SIZE = 128
CHAIN_ELEMENTS = ("bfloat16", "float16")
CHAIN_COLUMNS = (128, 64)
CHAIN_SHARED = 225_568
GRADIENTS_SHARED = 115_664
# 32-bit words of a tile's records by head (kernels_cu/tile/fused/record.cuh).
STATE_WORDS = 8192
TOKEN_WORDS = 2048
FORWARD_UNITS = 24
BACKWARD_UNITS = 40
FOLD_COLUMNS = 8
FOLD_SHARED = 4 * (2 * CHAIN_SIZE * (CHAIN_SIZE + 4) + CHAIN_SIZE * FOLD_COLUMNS)

# Warps of one block of `decay_bounds`, each of which works alone.
DECAY_WARPS = 8

# Warps of one block of `sum_groups`, one for each row.
SUM_WARPS = 8

# Channels of one block of `short_conv` and its backward.
CONV_COLUMNS = 128

# Kinds of parameters: the C type's size follows from the NumPy type; an array is passed as its address.
POINTER = "pointer"
INTEGER = np.int32
REAL = np.float32


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


class ChainVariant(NamedTuple):
    """What a chain is compiled for.

    bounded: for the `lower_bound` gate, else for the two others. columns: value columns of a block. queries: whether it
    reads queries; the forward then writes outputs. saves: whether it leaves records for the gradients. reversed: the
    backward's chain.
    """

    element: str
    bounded: bool
    columns: int
    queries: bool
    saves: bool
    reversed: bool

    @property
    def defines(self):
        """(name, value) pairs for the compiler."""
        return (("KDA_CHUNK", CHUNK), ("KDA_ELEMENT", ELEMENTS[self.element]), ("KDA_BOUNDED", int(self.bounded)),
                ("KDA_COLUMNS", self.columns), ("KDA_QUERIES", int(self.queries)), ("KDA_SAVES", int(self.saves)),
                ("KDA_REVERSED", int(self.reversed)), ("KDA_SHARED_BYTES", CHAIN_SHARED))


@dataclass(frozen=True)
class Defines:
    """What a kernel with few choices is compiled for: its (name, value) pairs."""

    defines: tuple


def fold_variant(reversed):
    """The variant of `fold_states` for the forward or the backward."""
    return Defines((("KDA_REVERSED", int(reversed)), ("KDA_SHARED_BYTES", FOLD_SHARED)))


def certify_variant(element, reversed):
    """The variant of `certify_cuts` for an element type, for the forward or the backward."""
    return Defines((("KDA_CHUNK", CHUNK), ("KDA_ELEMENT", ELEMENTS[element]), ("KDA_REVERSED", int(reversed))))


def element_variant(element):
    """The variant for an element type of a kernel that has one for each."""
    return Defines((("KDA_CHUNK", CHUNK), ("KDA_ELEMENT", ELEMENTS[element])))


def gradients_variant(element, bounded, grouped):
    """The variant of `sm90_gradients` for an element type; bounded: for the `lower_bound` gate, else for the two others;
    grouped: for more value heads than key heads.
    """
    return Defines((("KDA_CHUNK", CHUNK), ("KDA_ELEMENT", ELEMENTS[element]), ("KDA_BOUNDED", int(bounded)),
                    ("KDA_GROUPED", int(grouped)), ("KDA_SHARED_BYTES", GRADIENTS_SHARED)))


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    file: under kernels_cu; the entry point has the kernel's name. parameters: (name, kind) in order.
    variants(target): all that it may be launched as on a target, none where it doesn't run; a variant has `defines`.
    threads(variant): of a block. shared(variant): bytes of dynamic shared memory.
    blocks(arguments): of the one-dimensional grid, from the launch's arguments by name; `count` is among them, the
    number of chunks, spans or sequences that the kernel's grid runs over.
    """

    name: str
    file: str
    parameters: tuple
    variants: object
    threads: object
    shared: object
    blocks: object


def _general(target):
    """The variants of the portable kernels."""
    return [variant(element, K, target) for element in ELEMENTS for K in KEY_SIZES]


def hopper_variants(*variants):
    """Those variants where kernels of sm_90a run."""
    return lambda target: list(variants) if target.hopper else []


def _chains(reversed, *kinds):
    """kinds: (columns, queries, saves)."""
    return hopper_variants(*(ChainVariant(element, bounded, *kind, reversed) for element in CHAIN_ELEMENTS
                     for bounded in (True, False) for kind in kinds))


_FORWARD_CHAINS = _chains(False, *((columns, True, saves) for columns in CHAIN_COLUMNS for saves in (False, True)),
                          (CHAIN_SIZE, False, False))
_BACKWARD_CHAINS = _chains(True, *((columns, True, saves) for columns in CHAIN_COLUMNS for saves in (False, True)))


def tiles(columns, width):
    """Tiles of that width that cover so many columns."""
    return -(-columns // width)


def pointers(*names):
    return tuple((name, POINTER) for name in names)


def integers(*names):
    return tuple((name, INTEGER) for name in names)


def reals(*names):
    return tuple((name, REAL) for name in names)


_SIZES = integers("value_heads", "key_size", "value_size")
_ACTIVATION = integers("gate_form", "beta_form", "qk_l2norm") + reals("lower_bound", "scale")
_CHAIN = (pointers("records", "v", "initial", "cu_seqlens", "chunk_offsets", "span_chunks", "span_sequences")
          + integers("spans") + _SIZES)


def _chain_blocks(arguments):
    return arguments["count"] * arguments["value_heads"] * tiles(arguments["value_size"], TILE_COLUMNS)


def _chain_shared(variant):
    return 4 * variant.stages * variant.record


def _fused_threads(variant):
    return 32 * (8 + variant.columns // 16)


def _fused_blocks(arguments):
    # count: multiprocessors, each of which holds one block.
    return min(arguments["items"], arguments["count"])


def _token_gradients_shared(variant):
    passing = 3 * max(TILE_COLUMNS + 16, variant.key_size + 8)
    return 4 * CHUNK * (passing + 2 * (variant.key_size + 8))


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "prepare", "kernels/prepare.cu",
            pointers("q", "k", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "chunk_offsets")
            + integers("sequences", "key_heads", "value_heads", "key_size") + _ACTIVATION + pointers("records"),
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
            pointers("transition", "reached", "initial", "sequence_spans") + _SIZES + pointers("states"),
            variants=_general,
            threads=lambda variant: variant.key_size,
            shared=lambda variant: 0,
            blocks=lambda a: a["count"] * a["value_heads"] * tiles(a["value_size"], SCAN_COLUMNS),
        ),
        Kernel(
            "step", "kernels/step.cu",
            pointers("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial", "cu_seqlens") + integers("key_heads")
            + _SIZES + _ACTIVATION + pointers("out", "final"),
            variants=_general,
            threads=lambda variant: 2 * variant.key_size,
            shared=lambda variant: 0,
            blocks=lambda a: a["count"] * a["value_heads"] * tiles(a["value_size"], STEP_COLUMNS),
        ),
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
            "sm90_chain", "kernels/sm90_chain.cu",
            pointers("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "final_state", "carried",
                      "transitions", "out", "states", "tokens", "units", "pieces", "warmup_chunks")
            + integers("items", "key_heads", "value_heads", "gate_form", "beta_form") + reals("lower_bound", "scale"),
            variants=_FORWARD_CHAINS,
            threads=_fused_threads,
            shared=lambda variant: CHAIN_SHARED,
            blocks=_fused_blocks,
        ),
        Kernel(
            "sm90_backward_chain", "kernels/sm90_backward_chain.cu",
            pointers("q", "k", "d_out", "g", "beta", "A_log", "dt_bias", "d_final_state", "d_initial_state", "carried",
                      "states", "tokens", "units", "pieces", "warmup_chunks")
            + integers("items", "key_heads", "value_heads", "gate_form", "beta_form") + reals("lower_bound", "scale"),
            variants=_BACKWARD_CHAINS,
            threads=_fused_threads,
            shared=lambda variant: CHAIN_SHARED,
            blocks=_fused_blocks,
        ),
        Kernel(
            "sm90_gradients", "kernels/sm90_gradients.cu",
            pointers("q", "k", "g", "beta", "A_log", "dt_bias", "d_out", "states", "tokens", "units", "d_states",
                      "d_tokens", "d_units", "tiles")
            + integers("key_heads", "value_heads", "gate_form", "beta_form") + reals("lower_bound", "scale")
            + pointers("dq", "dk", "dv", "dg", "dbeta", "d_bias", "d_rate"),
            variants=hopper_variants(*(gradients_variant(element, bounded, grouped) for element in CHAIN_ELEMENTS
                               for bounded in (True, False) for grouped in (False, True))),
            threads=lambda variant: 256,
            shared=lambda variant: GRADIENTS_SHARED,
            blocks=lambda a: a["count"] * a["value_heads"],
        ),
        Kernel(
            "sum_groups", "kernels/sum_groups.cu",
            pointers("shares") + integers("rows", "group") + pointers("sums"),
            variants=hopper_variants(*map(element_variant, CHAIN_ELEMENTS)),
            threads=lambda variant: 32 * SUM_WARPS,
            shared=lambda variant: 0,
            blocks=lambda a: tiles(a["count"], SUM_WARPS),
        ),
        Kernel(
            "fold_states", "kernels/fold_states.cu",
            pointers("chains", "transitions", "carried", "warmup_chunks")
            + integers("value_heads", "slots_behind"),
            variants=hopper_variants(fold_variant(False), fold_variant(True)),
            threads=lambda variant: 256,
            shared=lambda variant: FOLD_SHARED,
            blocks=lambda a: a["count"] * a["value_heads"] * (CHAIN_SIZE // FOLD_COLUMNS),
        ),
        Kernel(
            "certify_cuts", "kernels/certify_cuts.cu",
            pointers("g", "A_log", "dt_bias", "cuts", "warmup_chunks", "bounds") + integers("value_heads", "gate_form")
            + reals("lower_bound", "log_tolerance"),
            variants=hopper_variants(*(certify_variant(element, reversed) for element in CHAIN_ELEMENTS
                               for reversed in (False, True))),
            threads=lambda variant: 512,
            shared=lambda variant: 0,
            blocks=lambda a: a["count"] * a["value_heads"],
        ),
        Kernel(
            "decay_bounds", "kernels/decay_bounds.cu",
            pointers("q", "k", "v", "g", "beta", "A_log", "dt_bias") + integers("tokens", "key_heads") + _SIZES
            + integers("gate_form", "beta_form", "qk_l2norm", "quantity", "chunks_per_row") + reals("lower_bound")
            + pointers("logs", "added"),
            variants=lambda target: [element_variant(element) for element in ELEMENTS],
            threads=lambda variant: 32 * DECAY_WARPS,
            shared=lambda variant: 0,
            blocks=lambda a: tiles(a["count"] * a["value_heads"], DECAY_WARPS),
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
            + integers("spans") + _SIZES + pointers("d_entering", "d_states", "d_values"),
            variants=_general,
            threads=lambda variant: 128,
            shared=lambda variant: 4 * variant.stages * variant.turned_record,
            blocks=_chain_blocks,
        ),
        Kernel(
            "backward_tokens", "kernels/backward_tokens.cu",
            pointers("q", "k", "g", "beta", "A_log", "dt_bias", "d_out", "states", "writes", "d_states", "d_values",
                      "cu_seqlens", "chunk_offsets")
            + integers("sequences", "key_heads") + _SIZES + _ACTIVATION
            + pointers("dq", "dk", "dv", "dg", "dbeta", "d_bias", "d_rate"),
            variants=_general,
            threads=lambda variant: variant.key_size,
            shared=_token_gradients_shared,
            blocks=lambda a: a["count"] * a["key_heads"],
        ),
    )
}
