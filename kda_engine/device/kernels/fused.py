"""The kernels of the fused path."""

from typing import NamedTuple

from ...layout import CHUNK
from .table import (ELEMENTS, Defines, Kernel, element_variant, hopper_variants, integers, pointers, reals,
                    tiles)

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

# Warps of one block of `sum_groups`, one for each row.
SUM_WARPS = 8


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


def fold_variant(reversed):
    """The variant of `fold_states` for the forward or the backward."""
    return Defines((("KDA_REVERSED", int(reversed)), ("KDA_SHARED_BYTES", FOLD_SHARED)))


def certify_variant(element, reversed):
    """The variant of `certify_cuts` for an element type, for the forward or the backward."""
    return Defines((("KDA_CHUNK", CHUNK), ("KDA_ELEMENT", ELEMENTS[element]), ("KDA_REVERSED", int(reversed))))


def gradients_variant(element, bounded, grouped):
    """The variant of `sm90_gradients` for an element type; bounded: for the `lower_bound` gate, else for the two others;
    grouped: for more value heads than key heads.
    """
    return Defines((("KDA_CHUNK", CHUNK), ("KDA_ELEMENT", ELEMENTS[element]), ("KDA_BOUNDED", int(bounded)),
                    ("KDA_GROUPED", int(grouped)), ("KDA_SHARED_BYTES", GRADIENTS_SHARED)))


def _chains(reversed, *kinds):
    """kinds: (columns, queries, saves)."""
    return hopper_variants(*(ChainVariant(element, bounded, *kind, reversed) for element in CHAIN_ELEMENTS
                     for bounded in (True, False) for kind in kinds))


_FORWARD_CHAINS = _chains(False, *((columns, True, saves) for columns in CHAIN_COLUMNS for saves in (False, True)),
                          (CHAIN_SIZE, False, False))
_BACKWARD_CHAINS = _chains(True, *((columns, True, saves) for columns in CHAIN_COLUMNS for saves in (False, True)))


def _fused_threads(variant):
    return 32 * (8 + variant.columns // 16)


def _fused_blocks(arguments):
    # count: multiprocessors, each of which holds one block.
    return min(arguments["items"], arguments["count"])


KERNELS = (
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
)
