"""How a variable-length problem is dealt to the chain kernels: pieces of sequences, and what is carried to the cuts."""

from dataclasses import dataclass

import numpy as np

from ...layout import CHUNK
from ..kernels.fused import CHAIN_COLUMNS
from .tables import cut_spans

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

# Chunks of a tile, the unit of what the chains leave for the gradients; sequences are cut between tiles only.
TILE_CHUNKS = 2
TILE_TOKENS = TILE_CHUNKS * CHUNK

# Rows of the tables (kernels_cu/varlen/work_item.cuh, kernels/certify_cuts.cu, tile/fused/gradient_tile.cuh).
_PIECE = np.dtype([("first_token", "<i8"), ("tokens", "<i4"), ("carried", "<i4"), ("state_in", "<i4"),
                   ("state_out", "<i4"), ("first_tile", "<i8")])
_CUT = np.dtype([("token", "<i8"), ("chunks", "<i4"), ("unused", "<i4")])
_TILE = np.dtype([("token", "<i8"), ("tokens", "<i4"), ("unused", "<i4")])
_STATE, _TRANSITION = 0, 1

# Where the forward's transition of a piece lies, seen from the slot in front of the piece, which the backward folds to.
FORWARD_TRANSITION = 1

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
    fold over each cut sequence, None where no sequence has two cuts. cuts: where the slots lie; cut_tokens,
    cut_sequences: the same on the host, first token behind each cut and number of its sequence. tiles: all tiles in
    order. backward: the same slots the other way round.
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
    cut_tokens: np.ndarray
    cut_sequences: np.ndarray
    summary: Table
    summary_states: Table
    summary_slots: int
    summary_chains: Table | None
    first_slots: object
    last_slots: object
    tiles: Table
    backward: "BackwardPlan"


@dataclass(frozen=True)
class BackwardPlan:
    """Tables of the backward of one problem. A slot holds the gradient of the state at its cut.

    sweep: the pieces to work through, longest first; first: of those, the sequences' first ones. before: what is
    carried to the cuts first, None where nothing is cut. transitions: those of the pieces between two cuts, each in the slot
    before it; chains: the fold over each cut sequence, from its last slot to its first; both None where no sequence has
    two cuts. cuts: where the slots lie.
    """

    sweep: Table
    first: Table
    before: Table | None
    transitions: Table | None
    chains: Table | None
    cuts: Table | None


def make_chain_plan(device, cu_seqlens, value_heads, certified):
    """The ChainPlan for cu_seqlens (bytes of int64 [N+1]) on a Device, for its `ready`.

    certified: the warm-ups before the cuts may turn out short.
    """
    cu_seqlens = np.frombuffer(cu_seqlens, dtype=np.int64)
    counts = -(-np.diff(cu_seqlens) // CHUNK)
    length, columns = choose(counts, value_heads, device.target.multiprocessors, certified)
    pieces = _Pieces(cu_seqlens, counts, length)
    first, last = pieces.first, pieces.last
    slots = int((~last).sum())
    behind = np.cumsum(~last) - 1
    every = np.arange(len(first))
    begins, ends = -1 - pieces.sequence, -1 - pieces.sequence
    enters = np.where(first, begins, _NOWHERE)
    states = pieces.rows(every >= 0, _STATE, enters, every)
    transitions = pieces.rows(every >= 0, _TRANSITION, _NOWHERE, every)
    return ChainPlan(
        columns=columns,
        forward=_longest_first(device, pieces.rows(
            every >= 0, _STATE, np.where(first, begins, behind - ~last), np.where(last, ends, _NOWHERE))),
        before=_longest_first(device,
            pieces.rows(~last, _STATE, enters, behind),
            pieces.rows(~last & ~first, _TRANSITION, _NOWHERE, behind)) if slots else None,
        slots=slots,
        chains=_chains(device, behind[first & ~last], pieces.counts[pieces.counts > 1] - 2),
        cuts=_upload(device, pieces.cuts(~last, pieces.first_token + pieces.tokens, pieces.chunks)) if slots else None,
        cut_tokens=(pieces.first_token + pieces.tokens)[~last],
        cut_sequences=pieces.sequence[~last],
        summary=_longest_first(device, states, transitions),
        summary_states=_longest_first(device, states),
        summary_slots=len(every),
        summary_chains=_chains(device, every[first], pieces.counts - 1),
        first_slots=None if len(every) == len(counts) else device.upload(every[first]),
        last_slots=None if len(every) == len(counts) else device.upload(every[last]),
        tiles=_tiles(device, cu_seqlens),
        backward=_backward_plan(device, pieces, behind),
    )


def _backward_plan(device, pieces, behind):
    """behind: number of the slot behind each piece, where there is one."""
    first, last = pieces.first, pieces.last
    before = behind - ~last
    begins, ends = -1 - pieces.sequence, -1 - pieces.sequence
    sweep = pieces.rows(np.ones(len(first), bool), _STATE, np.where(last, ends, behind),
                        np.where(first, begins, _NOWHERE))
    cut = bool((~first).any())
    middle = ~first & ~last
    return BackwardPlan(
        sweep=_longest_first(device, sweep), first=_longest_first(device, sweep[first]),
        before=_longest_first(device, pieces.rows(~first, _STATE, np.where(last, ends, _NOWHERE), before)) if cut else None,
        transitions=_longest_first(device, pieces.rows(middle, _TRANSITION, _NOWHERE, before)) if middle.any() else None,
        chains=_chains(device, before[last & ~first], pieces.counts[pieces.counts > 1] - 2),
        cuts=_upload(device, pieces.cuts(~first, pieces.first_token, pieces.tokens // CHUNK)) if cut else None,
    )


def _tiles(device, cu_seqlens):
    lengths = np.diff(cu_seqlens)
    counts = -(-lengths // TILE_TOKENS)
    sequence = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.zeros(len(sequence), _TILE)
    rows["token"] = cu_seqlens[sequence] + TILE_TOKENS * number
    rows["tokens"] = np.minimum(lengths[sequence] - TILE_TOKENS * number, TILE_TOKENS)
    return _upload(device, rows)


class _Pieces:
    """All pieces in order, as arrays; length: chunks of one at most. counts: pieces of each sequence."""

    def __init__(self, cu_seqlens, counts, length):
        tiles = -(-counts // TILE_CHUNKS)
        bounds, self.sequence = cut_spans(tiles, -(-length // TILE_CHUNKS))
        offsets = np.concatenate([[0], np.cumsum(tiles)])[:-1]
        self.first_tile = bounds[0]
        chunks = TILE_CHUNKS * (bounds - offsets[self.sequence])
        self.first_token = cu_seqlens[self.sequence] + CHUNK * chunks[0]
        self.chunks = np.minimum(chunks[1], counts[self.sequence]) - chunks[0]
        self.tokens = np.minimum(CHUNK * self.chunks, cu_seqlens[self.sequence + 1] - self.first_token)
        change = np.diff(self.sequence) != 0
        self.first, self.last = np.append(True, change), np.append(change, True)
        self.counts = np.bincount(self.sequence, minlength=len(counts))
        if not len(counts):
            self.first = self.last = np.zeros(0, bool)

    def rows(self, which, carried, state_in, state_out):
        rows = np.zeros(len(self.first), _PIECE)
        rows["first_token"], rows["tokens"], rows["carried"] = self.first_token, self.tokens, carried
        rows["state_in"], rows["state_out"], rows["first_tile"] = state_in, state_out, self.first_tile
        return rows[which]

    def cuts(self, which, token, chunks):
        rows = np.zeros(len(self.first), _CUT)
        rows["token"], rows["chunks"] = token, np.minimum(chunks, MOST_WARMUP)
        return rows[which]


def _longest_first(device, *tables):
    rows = np.concatenate(tables)
    return _upload(device, rows[np.argsort(-rows["tokens"], kind="stable")])


def _upload(device, rows):
    return Table(len(rows), device.upload(rows.view(np.uint8)))


def _chains(device, first_slots, links):
    """The fold's table, None where there is nothing to fold."""
    if links.max(initial=0) <= 0:
        return None
    return _upload(device, np.stack([first_slots, links], axis=1).astype(np.int32)[links > 0])


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
