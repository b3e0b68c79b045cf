"""How a variable-length problem is dealt to the chain kernel: pieces of sequences, and what is carried to the cuts."""

from dataclasses import dataclass
from functools import lru_cache

import cupy
import numpy as np

from ..layout import CHUNK
from .kernels import CHAIN_COLUMNS
from .plan import cut_spans

# Microseconds of a chunk in the chain kernel by value columns of a block, of one without outputs, of a link of the
# fold, and of a launch with what it starts and drains: measured, only to choose between plans.
FORWARD_CHUNK = {128: 1.15, 64: 0.9}
SUMMARY_CHUNK = 0.87
FOLD_LINK = 1.3
LAUNCH = 6.0

# Chunks before a cut that are looked at for a certified warm-up, and how many are expected to do.
MOST_WARMUP = 96
EXPECTED_WARMUP = 48

# Shorter pieces do not pay for their transition.
LEAST_PIECE = 8

# Rows of the tables (kernels_cu/varlen/work_item.cuh, kernels/certify_cuts.cu).
_PIECE = np.dtype([("first_token", "<i8"), ("tokens", "<i4"), ("carried", "<i4"), ("state_in", "<i4"),
                   ("state_out", "<i4"), ("unused", "<i8")])
_CUT = np.dtype([("token", "<i8"), ("chunks", "<i4"), ("unused", "<i4")])
_STATE, _TRANSITION = 0, 1
_NOWHERE = -(2**31)


@dataclass(frozen=True, eq=False)
class Table:
    """Rows on the device; count of them. Each table is equal to itself only."""

    count: int
    rows: object


@dataclass(frozen=True)
class ChainPlan:
    """Tables of one problem, on the device.

    columns: value columns of a block of the forward. forward: the pieces to work through for outputs, longest first.
    before: what is carried to the cuts first, None where nothing is cut. slots: states carried to cuts. chains: the
    fold over each cut sequence, None where no sequence has two cuts. cuts: where the slots lie.
    summary: the pieces whose states and transitions make up every sequence; summary_states: those of the states only.
    summary_slots, summary_chains: likewise. first_slots, last_slots: of each sequence in the summary, None where each
    sequence is one piece and its slot has its number.
    """

    columns: int
    forward: Table
    before: Table | None
    slots: int
    chains: Table | None
    cuts: Table | None
    summary: Table
    summary_states: Table
    summary_slots: int
    summary_chains: Table | None
    first_slots: object
    last_slots: object


def make_chain_plan(cu_seqlens, value_heads, multiprocessors, certified, from_zeros):
    """The ChainPlan for cu_seqlens (NumPy int64 [N+1]); the last few are remembered.

    certified: the warm-ups before the cuts may turn out short. from_zeros: there are no initial states to read.
    """
    return _plan(cupy.cuda.runtime.getDevice(), cu_seqlens.tobytes(), value_heads, multiprocessors, certified,
                 from_zeros)


@lru_cache(maxsize=64)
def _plan(device, cu_seqlens, value_heads, multiprocessors, certified, from_zeros):
    cu_seqlens = np.frombuffer(cu_seqlens, dtype=np.int64)
    counts = -(-np.diff(cu_seqlens) // CHUNK)
    length, columns = choose(counts, value_heads, multiprocessors, certified)
    pieces = _Pieces(cu_seqlens, counts, length)
    inner = ~pieces.last
    slots = int(inner.sum())
    own = np.cumsum(inner) - 1
    initial = np.full_like(pieces.sequence, _NOWHERE) if from_zeros else -1 - pieces.sequence
    enters = np.where(pieces.first, initial, _NOWHERE)
    before = None
    if slots:
        before = _longest_first(
            pieces.rows(inner, _STATE, enters, own), pieces.rows(inner & ~pieces.first, _TRANSITION, _NOWHERE, own))
    every = np.arange(len(pieces.first))
    states = pieces.rows(every >= 0, _STATE, enters, every)
    transitions = pieces.rows(every >= 0, _TRANSITION, _NOWHERE, every)
    return ChainPlan(
        columns=columns,
        forward=_longest_first(pieces.rows(
            every >= 0, _STATE, np.where(pieces.first, initial, own - inner),
            np.where(pieces.last, -1 - pieces.sequence, _NOWHERE))),
        before=before,
        slots=slots,
        chains=_chains(own[pieces.first & inner], pieces.counts[pieces.counts > 1] - 2),
        cuts=_upload(pieces.cuts(inner)) if slots else None,
        summary=_longest_first(states, transitions),
        summary_states=_longest_first(states),
        summary_slots=len(every),
        summary_chains=_chains(every[pieces.first], pieces.counts - 1),
        first_slots=None if len(every) == len(counts) else cupy.asarray(every[pieces.first]),
        last_slots=None if len(every) == len(counts) else cupy.asarray(every[pieces.last]),
    )


class _Pieces:
    """All pieces in order, as arrays. counts: pieces of each sequence."""

    def __init__(self, cu_seqlens, counts, length):
        chunks, self.sequence = cut_spans(counts, length)
        offsets = np.concatenate([[0], np.cumsum(counts)])[:-1]
        self.first_token = cu_seqlens[self.sequence] + CHUNK * (chunks[0] - offsets[self.sequence])
        self.chunks = chunks[1] - chunks[0]
        self.tokens = np.minimum(CHUNK * self.chunks, cu_seqlens[self.sequence + 1] - self.first_token)
        change = np.diff(self.sequence) != 0
        self.first, self.last = np.append(True, change), np.append(change, True)
        self.counts = np.bincount(self.sequence, minlength=len(counts))
        if not len(counts):
            self.first = self.last = np.zeros(0, bool)

    def rows(self, which, carried, state_in, state_out):
        rows = np.zeros(len(self.first), _PIECE)
        rows["first_token"], rows["tokens"], rows["carried"] = self.first_token, self.tokens, carried
        rows["state_in"], rows["state_out"] = state_in, state_out
        return rows[which]

    def cuts(self, which):
        rows = np.zeros(len(self.first), _CUT)
        rows["token"], rows["chunks"] = self.first_token + self.tokens, np.minimum(self.chunks, MOST_WARMUP)
        return rows[which]


def _longest_first(*tables):
    rows = np.concatenate(tables)
    return _upload(rows[np.argsort(-rows["tokens"], kind="stable")])


def _upload(rows):
    return Table(len(rows), cupy.asarray(rows.view(np.uint8)))


def _chains(first_slots, links):
    """The fold's table, None where there is nothing to fold."""
    if links.max(initial=0) <= 0:
        return None
    return _upload(np.stack([first_slots, links], axis=1).astype(np.int32)[links > 0])


def choose(counts, value_heads, multiprocessors, certified):
    """(chunks per piece, value columns of a block) of the plan expected to be the fastest."""
    longest = max(int(counts.max(initial=0)), 1)
    lengths = {longest} | {-(-longest // n) for n in range(2, 65) if longest >= LEAST_PIECE * n}
    return min(((length, columns) for length in sorted(lengths, reverse=True) for columns in CHAIN_COLUMNS),
               key=lambda plan: _expected(counts, *plan, value_heads, multiprocessors, certified))


def _expected(counts, length, columns, value_heads, multiprocessors, certified):
    """Microseconds of a plan."""
    pieces = np.maximum(-(-counts // length), 1)
    size = -(-counts // pieces)
    work = lambda times, limit=length: _makespan(np.minimum(size, limit), times * value_heads, multiprocessors)
    forward = work(pieces * (128 // columns)) * FORWARD_CHUNK[columns] + LAUNCH
    cuts = int(pieces.max(initial=1)) - 1
    if cuts == 0:
        return forward
    exact = work(2 * pieces - 2 - (pieces > 1)) * SUMMARY_CHUNK + FOLD_LINK * cuts + 2 * LAUNCH
    if not certified:
        return forward + exact
    # What the gates will be like is not known here: half the hope, half the fear.
    warmed = work(pieces - 1, EXPECTED_WARMUP) * SUMMARY_CHUNK + 3 * LAUNCH
    return forward + (exact + warmed) / 2


def _makespan(chunks, times, multiprocessors):
    """Chunks of the first block, when pieces of so many chunks, each so often, are dealt in turns, longest first."""
    order = np.argsort(-chunks, kind="stable")
    chunks, behind = chunks[order], np.cumsum(times[order])
    if not len(chunks) or behind[-1] == 0:
        return 0
    # The first block gets every multiprocessors-th item from the start.
    taken = np.searchsorted(behind, np.arange(0, behind[-1], multiprocessors), side="right")
    return int(chunks[taken].sum())
