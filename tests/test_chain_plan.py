"""How problems are dealt to the chain kernels, worked through with scalar states: no state may be missed or mixed up."""

import numpy as np
import pytest

pytest.importorskip("cupy")

from fake_device import fake_device  # noqa: E402

from kda_engine.device.plans import fused as chain_plan  # noqa: E402
from kda_engine.device.plans.fused import (  # noqa: E402
    _CUT, _NOWHERE, _PIECE, _STATE, _TILE, TILE_CHUNKS, TILE_TOKENS, make_chain_plan)
from kda_engine.layout import CHUNK  # noqa: E402

_CHAIN = np.dtype([("first_slot", "<i4"), ("links", "<i4")])

LENGTHS = ((640,), (1000, 0, 7, 333), (16, 32, 48, 64, 65), (0,), (), (2049, 2048), (31,) * 9)


class Chunks:
    """Every chunk as x -> a x + b, with numbers of its own; sequences by their first token."""

    def __init__(self, cu_seqlens, seed):
        random = np.random.default_rng(seed)
        self.starts, self.counts = cu_seqlens[:-1], -(-np.diff(cu_seqlens) // CHUNK)
        self.a = [random.uniform(0.5, 1.5, n) for n in self.counts]
        self.b = [random.standard_normal(n) for n in self.counts]
        self.ends = random.standard_normal(len(self.counts))

    def of_piece(self, row):
        """(sequence, numbers of its chunks) of a piece."""
        candidates = np.flatnonzero((self.starts <= row["first_token"]) & (self.counts > 0))
        n = int(candidates[-1]) if len(candidates) and row["tokens"] else -1 - int(row["state_in"])
        first = int(row["first_token"] - self.starts[n]) // CHUNK
        assert (row["first_token"] - self.starts[n]) % TILE_TOKENS == 0
        return n, range(first, first + -(-int(row["tokens"]) // CHUNK))

    def through(self, row, x, backward):
        n, chunks = self.of_piece(row)
        for c in reversed(chunks) if backward else chunks:
            x = self.a[n][c] * x + self.b[n][c]
        return x

    def product(self, row):
        n, chunks = self.of_piece(row)
        return float(np.prod(self.a[n][chunks.start : chunks.stop]))


def read(device, table, dtype=_PIECE):
    if table is None:
        return []
    rows = device.uploads[table.rows.data.ptr].reshape(-1).view(dtype)
    assert len(rows) == table.count
    return rows


def carry(chunks, rows, carried, transitions, backward):
    for row in rows:
        if row["carried"] == _STATE:
            given = row["state_in"]
            x = 0.0 if given == _NOWHERE else chunks.ends[-1 - given]
            assert given < 0
            carried[row["state_out"]] = chunks.through(row, x, backward)
        else:
            transitions[row["state_out"]] = chunks.product(row)


def fold(chains, carried, transitions, direction):
    for first, links in chains:
        for link in range(links):
            at = first + direction * (link + 1)
            carried[at] += transitions[at] * carried[at - direction]


def work_through(chunks, rows, carried, backward):
    """The last states of all sequences; every chunk once."""
    seen, ended = set(), np.full(len(chunks.counts), np.nan)
    for row in rows:
        given, to = int(row["state_in"]), int(row["state_out"])
        x = chunks.through(row, carried[given] if given >= 0 else chunks.ends[-1 - given], backward)
        n, of_piece = chunks.of_piece(row)
        assert not seen & {(n, c) for c in of_piece}
        seen |= {(n, c) for c in of_piece}
        # Nobody may write where another piece of the same launch reads.
        assert to < 0
        if to != _NOWHERE:
            ended[-1 - to] = x
    assert len(seen) == chunks.counts.sum()
    return ended


def expected(chunks, backward):
    ended = []
    for n, x in enumerate(chunks.ends):
        order = range(chunks.counts[n])
        for c in reversed(order) if backward else order:
            x = chunks.a[n][c] * x + chunks.b[n][c]
        ended.append(x)
    return np.array(ended)


@pytest.fixture
def planned(monkeypatch):
    """(device, cu_seqlens, plan) of lengths cut into pieces of so many chunks."""
    with fake_device() as device:

        def plan(lengths, length):
            monkeypatch.setattr(chain_plan, "choose", lambda *given: (length, 128))
            cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            return device, cu_seqlens, make_chain_plan(device.device, cu_seqlens.tobytes(), 4, True)

        yield plan


PIECES = (1, 2, 3, 8, 1 << 20)


@pytest.mark.parametrize("length", PIECES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_forward(lengths, length, planned):
    device, cu_seqlens, plan = planned(lengths, length)
    chunks = Chunks(cu_seqlens, 1)
    carried, transitions = np.full((2, plan.slots), np.nan)
    carry(chunks, read(device, plan.before), carried, transitions, backward=False)
    fold(read(device, plan.chains, _CHAIN), carried, transitions, 1)
    ended = work_through(chunks, read(device, plan.forward), carried, backward=False)
    assert np.allclose(ended, expected(chunks, backward=False), rtol=1e-12)


@pytest.mark.parametrize("kept", (False, True))
@pytest.mark.parametrize("length", PIECES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_backward(lengths, length, kept, planned):
    """kept: with the transitions of the forward, a slot further on."""
    device, cu_seqlens, plan = planned(lengths, length)
    chunks, tables = Chunks(cu_seqlens, 2), plan.backward
    carried, transitions = np.full((2, plan.slots), np.nan)
    carry(chunks, read(device, tables.before), carried, transitions, backward=True)
    if kept:
        of_forward = np.full((2, plan.slots), np.nan)
        carry(chunks, read(device, plan.before), *of_forward, backward=False)
        transitions = np.append(of_forward[1][1:], np.nan)
    else:
        carry(chunks, read(device, tables.transitions), carried, transitions, backward=True)
    fold(read(device, tables.chains, _CHAIN), carried, transitions, -1)
    assert np.allclose(work_through(chunks, read(device, tables.sweep), carried, backward=True),
                       expected(chunks, backward=True), rtol=1e-12)
    first = {int(row["state_out"]): row for row in read(device, tables.first)}
    assert sorted(first) == sorted(-1 - n for n in range(len(lengths)))


@pytest.mark.parametrize("length", PIECES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_tiles_and_cuts(lengths, length, planned):
    device, cu_seqlens, plan = planned(lengths, length)
    tiles = read(device, plan.tiles, _TILE)
    covered = [(t, t + n) for t, n in zip(tiles["token"].tolist(), tiles["tokens"].tolist())]
    wanted = [(t, min(t + TILE_TOKENS, stop)) for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())
              for t in range(start, stop, TILE_TOKENS)]
    assert covered == wanted
    for row in read(device, plan.forward):
        if row["tokens"]:
            assert tiles["token"][row["first_tile"]] == row["first_token"]
        assert row["state_out"] != _NOWHERE or row["tokens"] % (TILE_CHUNKS * CHUNK) == 0
    # A cut's chunks lie whole within the piece that ends (backward: begins) there.
    ends = {int(row["state_out"]): row for row in read(device, plan.before) if row["carried"] == _STATE}
    begins = {int(row["state_out"]): row for row in read(device, plan.backward.before)}
    for slot, cut in enumerate(read(device, plan.cuts, _CUT)):
        assert cut["token"] == ends[slot]["first_token"] + ends[slot]["tokens"]
        assert cut["chunks"] * CHUNK <= ends[slot]["tokens"]
    for slot, cut in enumerate(read(device, plan.backward.cuts, _CUT)):
        assert cut["token"] == begins[slot]["first_token"] and cut["chunks"] * CHUNK <= begins[slot]["tokens"]
    assert len(ends) == len(begins) == plan.slots
