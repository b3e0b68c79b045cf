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
# 32-bit words of a tile's records by head (kernels_cu/tile/chain_record.cuh).
STATE_WORDS = 8192
TOKEN_WORDS = 2048
FORWARD_UNITS = 24
BACKWARD_UNITS = 40
FOLD_COLUMNS = 8
FOLD_SHARED = 4 * (2 * CHAIN_SIZE * (CHAIN_SIZE + 4) + CHAIN_SIZE * FOLD_COLUMNS)

# Widths that `probe_products` times; threads of the probes that are blocks of the chain.
PROBE_WIDTHS = (8, 16, 32, 64, 128)
PROBE_THREADS = 512

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
        """Floats of one chunk's prepared operands (kernels_cu/tile/general_operands.cuh)."""
        return 3 * CHUNK * self.key_size + self.key_size + 2 * CHUNK * CHUNK

    @property
    def turned_record(self):
        """Floats of the same in shared memory as the backward wants it (kernels_cu/tile/backward_pipe.cuh)."""
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


def products_variant(width, warpgroups):
    """The variant of `probe_products` for products of so many columns, by 1 or 2 warpgroups."""
    return Defines((("KDA_WIDTH", width), ("KDA_WARPGROUPS", warpgroups)))


def roles_variant(prepares, carries):
    """The variant of `probe_roles` in which those sides of the chain work; `probe_peer` is the recurrence alone."""
    return Defines((("KDA_CHUNK", CHUNK), ("KDA_ELEMENT", ELEMENTS["bfloat16"]), ("KDA_BOUNDED", 1),
                    ("KDA_COLUMNS", CHAIN_SIZE), ("KDA_QUERIES", 1), ("KDA_REVERSED", 0),
                    ("KDA_SHARED_BYTES", CHAIN_SHARED), ("KDA_PREPARES", int(prepares)), ("KDA_CARRIES", int(carries))))


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


def _hopper(*variants):
    """Those variants where kernels of sm_90a run."""
    return lambda target: list(variants) if target.hopper else []


def _chains(reversed, *kinds):
    """kinds: (columns, queries, saves)."""
    return _hopper(*(ChainVariant(element, bounded, *kind, reversed) for element in CHAIN_ELEMENTS
                     for bounded in (True, False) for kind in kinds))


_FORWARD_CHAINS = _chains(False, *((columns, True, saves) for columns in CHAIN_COLUMNS for saves in (False, True)),
                          (CHAIN_SIZE, False, False))
_BACKWARD_CHAINS = _chains(True, *((columns, True, saves) for columns in CHAIN_COLUMNS for saves in (False, True)))


def tiles(columns, width):
    """Tiles of that width that cover so many columns."""
    return -(-columns // width)


def _pointers(*names):
    return tuple((name, POINTER) for name in names)


def _integers(*names):
    return tuple((name, INTEGER) for name in names)


def _reals(*names):
    return tuple((name, REAL) for name in names)


_SIZES = _integers("value_heads", "key_size", "value_size")
_ACTIVATION = _integers("gate_form", "beta_form", "qk_l2norm") + _reals("lower_bound", "scale")
_CHAIN = (_pointers("records", "v", "initial", "cu_seqlens", "chunk_offsets", "span_chunks", "span_sequences")
          + _integers("spans") + _SIZES)


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
            _pointers("q", "k", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "chunk_offsets")
            + _integers("sequences", "heads", "value_heads", "key_size") + _ACTIVATION + _pointers("records"),
            variants=_general,
            threads=lambda variant: 128,
            shared=lambda variant: 4 * 3 * CHUNK * (variant.key_size + 8),
            blocks=lambda a: a["count"] * a["value_heads"],
        ),
        Kernel(
            "forward", "kernels/forward.cu", _CHAIN + _pointers("out", "final"),
            variants=_general,
            threads=lambda variant: 2 * WIDE_COLUMNS,
            shared=_chain_shared,
            blocks=lambda a: a["count"] * a["value_heads"] * tiles(a["value_size"], WIDE_COLUMNS),
        ),
        Kernel(
            "summary", "kernels/summary.cu", _CHAIN + _pointers("transition", "reached"),
            variants=_general,
            threads=lambda variant: 2 * WIDE_COLUMNS,
            shared=_chain_shared,
            blocks=lambda a: a["count"] * a["value_heads"] * (
                tiles(a["value_size"], WIDE_COLUMNS)
                + (0 if a["transition"] is None else tiles(a["key_size"], WIDE_COLUMNS))),
        ),
        Kernel(
            "scan", "kernels/scan.cu",
            _pointers("transition", "reached", "initial", "sequence_spans") + _SIZES + _pointers("states"),
            variants=_general,
            threads=lambda variant: variant.key_size,
            shared=lambda variant: 0,
            blocks=lambda a: a["count"] * a["value_heads"] * tiles(a["value_size"], SCAN_COLUMNS),
        ),
        Kernel(
            "step", "kernels/step.cu",
            _pointers("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial", "cu_seqlens") + _integers("heads")
            + _SIZES + _ACTIVATION + _pointers("out", "final"),
            variants=_general,
            threads=lambda variant: 2 * variant.key_size,
            shared=lambda variant: 0,
            blocks=lambda a: a["count"] * a["value_heads"] * tiles(a["value_size"], STEP_COLUMNS),
        ),
        Kernel(
            "short_conv", "kernels/short_conv.cu",
            _pointers("x", "weight", "bias", "halo", "cu_seqlens", "chunk_offsets")
            + _integers("sequences", "channels", "taps", "silu") + _pointers("y"),
            variants=lambda target: [element_variant(element) for element in ELEMENTS],
            threads=lambda variant: CONV_COLUMNS,
            shared=lambda variant: 0,
            blocks=lambda a: a["count"] * tiles(a["channels"], CONV_COLUMNS),
        ),
        Kernel(
            "short_conv_backward", "kernels/short_conv_backward.cu",
            _pointers("dy", "x", "weight", "bias", "halo", "bounds", "chunk_offsets")
            + _integers("sequences", "channels", "taps", "silu") + _pointers("dx", "dhalo", "partials"),
            variants=lambda target: [element_variant(element) for element in ELEMENTS],
            threads=lambda variant: CONV_COLUMNS,
            shared=lambda variant: 0,
            blocks=lambda a: a["count"] * tiles(a["channels"], CONV_COLUMNS),
        ),
        Kernel(
            "sm90_chain", "kernels/sm90_chain.cu",
            _pointers("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "final_state", "carried",
                      "transitions", "out", "states", "tokens", "units", "pieces", "warmup_chunks")
            + _integers("items", "key_heads", "heads", "gate_form", "beta_form") + _reals("lower_bound", "scale"),
            variants=_FORWARD_CHAINS,
            threads=_fused_threads,
            shared=lambda variant: CHAIN_SHARED,
            blocks=_fused_blocks,
        ),
        Kernel(
            "sm90_backward_chain", "kernels/sm90_backward_chain.cu",
            _pointers("q", "k", "d_out", "g", "beta", "A_log", "dt_bias", "d_final_state", "d_initial_state", "carried",
                      "states", "tokens", "units", "pieces", "warmup_chunks")
            + _integers("items", "key_heads", "heads", "gate_form", "beta_form") + _reals("lower_bound", "scale"),
            variants=_BACKWARD_CHAINS,
            threads=_fused_threads,
            shared=lambda variant: CHAIN_SHARED,
            blocks=_fused_blocks,
        ),
        Kernel(
            "sm90_gradients", "kernels/sm90_gradients.cu",
            _pointers("q", "k", "g", "beta", "A_log", "dt_bias", "d_out", "states", "tokens", "units", "d_states",
                      "d_tokens", "d_units", "tiles")
            + _integers("key_heads", "heads", "gate_form", "beta_form") + _reals("lower_bound", "scale")
            + _pointers("dq", "dk", "dv", "dg", "dbeta", "d_bias", "d_rate"),
            variants=_hopper(*(gradients_variant(element, bounded, grouped) for element in CHAIN_ELEMENTS
                               for bounded in (True, False) for grouped in (False, True))),
            threads=lambda variant: 256,
            shared=lambda variant: GRADIENTS_SHARED,
            blocks=lambda a: a["count"] * a["heads"],
        ),
        Kernel(
            "sum_groups", "kernels/sum_groups.cu",
            _pointers("shares") + _integers("rows", "group") + _pointers("sums"),
            variants=_hopper(*map(element_variant, CHAIN_ELEMENTS)),
            threads=lambda variant: 32 * SUM_WARPS,
            shared=lambda variant: 0,
            blocks=lambda a: tiles(a["count"], SUM_WARPS),
        ),
        Kernel(
            "probe_products", "kernels/probe_products.cu", _pointers("cycles", "sums") + _integers("rounds"),
            variants=_hopper(*(products_variant(width, groups) for width in PROBE_WIDTHS for groups in (1, 2))),
            threads=lambda variant: 128 * dict(variant.defines)["KDA_WARPGROUPS"],
            shared=lambda variant: 0,
            blocks=lambda a: a["count"],
        ),
        Kernel(
            "probe_roles", "kernels/probe_roles.cu",
            _pointers("raw", "beta", "A_log", "dt_bias", "out", "final_state", "sums", "cycles") + _integers("chunks")
            + _reals("lower_bound", "scale"),
            variants=_hopper(roles_variant(True, False), roles_variant(False, True), roles_variant(True, True)),
            threads=lambda variant: PROBE_THREADS,
            shared=lambda variant: CHAIN_SHARED,
            blocks=lambda a: a["count"],
        ),
        Kernel(
            "probe_peer", "kernels/probe_peer.cu",
            _pointers("raw", "beta", "A_log", "dt_bias", "out", "final_state", "cycles")
            + _integers("chunks", "turns", "interval", "send") + _reals("lower_bound", "scale"),
            variants=_hopper(roles_variant(False, True)),
            threads=lambda variant: PROBE_THREADS,
            shared=lambda variant: CHAIN_SHARED,
            # An even number: blocks come in pairs.
            blocks=lambda a: a["count"],
        ),
        Kernel(
            "fold_states", "kernels/fold_states.cu",
            _pointers("chains", "transitions", "carried", "warmup_chunks") + _integers("heads"),
            variants=_hopper(fold_variant(False), fold_variant(True)),
            threads=lambda variant: 256,
            shared=lambda variant: FOLD_SHARED,
            blocks=lambda a: a["count"] * a["heads"] * (CHAIN_SIZE // FOLD_COLUMNS),
        ),
        Kernel(
            "certify_cuts", "kernels/certify_cuts.cu",
            _pointers("g", "A_log", "dt_bias", "cuts", "warmup_chunks", "bounds") + _integers("heads", "gate_form")
            + _reals("lower_bound", "log_tolerance"),
            variants=_hopper(*(certify_variant(element, reversed) for element in CHAIN_ELEMENTS
                               for reversed in (False, True))),
            threads=lambda variant: 512,
            shared=lambda variant: 0,
            blocks=lambda a: a["count"] * a["heads"],
        ),
        Kernel(
            "decay_bounds", "kernels/decay_bounds.cu",
            _pointers("q", "k", "v", "g", "beta", "A_log", "dt_bias") + _integers("tokens", "heads") + _SIZES
            + _integers("gate_form", "beta_form", "qk_l2norm", "quantity", "chunks_per_row") + _reals("lower_bound")
            + _pointers("logs", "added"),
            variants=lambda target: [element_variant(element) for element in ELEMENTS],
            threads=lambda variant: 32 * DECAY_WARPS,
            shared=lambda variant: 0,
            blocks=lambda a: tiles(a["count"] * a["value_heads"], DECAY_WARPS),
        ),
        Kernel(
            "backward_states", "kernels/backward_states.cu", _CHAIN + _pointers("states", "writes"),
            variants=_general,
            threads=lambda variant: 128,
            shared=_chain_shared,
            blocks=_chain_blocks,
        ),
        Kernel(
            "backward_sweep", "kernels/backward_sweep.cu",
            _pointers("records", "d_out", "d_leaving", "cu_seqlens", "chunk_offsets", "span_chunks", "span_sequences")
            + _integers("spans") + _SIZES + _pointers("d_entering", "d_states", "d_values"),
            variants=_general,
            threads=lambda variant: 128,
            shared=lambda variant: 4 * variant.stages * variant.turned_record,
            blocks=_chain_blocks,
        ),
        Kernel(
            "backward_tokens", "kernels/backward_tokens.cu",
            _pointers("q", "k", "g", "beta", "A_log", "dt_bias", "d_out", "states", "writes", "d_states", "d_values",
                      "cu_seqlens", "chunk_offsets")
            + _integers("sequences", "heads") + _SIZES + _ACTIVATION
            + _pointers("dq", "dk", "dv", "dg", "dbeta", "d_bias", "d_rate"),
            variants=_general,
            threads=lambda variant: variant.key_size,
            shared=_token_gradients_shared,
            blocks=lambda a: a["count"] * a["heads"],
        ),
    )
}
