"""Cuts of sequences over ranks: every token and every sequence end has one owner, cuts lie on the chunk grid."""

import numpy as np
import pytest

from kda_engine import InputError
from kda_engine.layout import CHUNK
from kda_engine.partition import chain, partition

BOUNDS = ([0, 0], [0, 1], [0, 15], [0, 16], [0, 100], [0, 1000], [0, 0, 5, 5, 40, 40, 97, 97], [0, 64, 64, 200],
          [0, 0, 0, 0], [0, 7, 14, 21, 28, 300], list(range(0, 50)))


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_every_token_and_sequence_has_one_owner(bounds, ranks):
    segments = partition(bounds, ranks)
    assert [s.rank for s in segments] == list(range(ranks))
    assert segments[0].start == 0 and segments[-1].stop == bounds[-1]
    owners = np.zeros(bounds[-1], int)
    started, ended = [], []
    for before, after in zip(segments, segments[1:]):
        assert before.stop == after.start
    for s in segments:
        at = s.start
        for i, piece in enumerate(s.pieces):
            first, last = bounds[piece.sequence], bounds[piece.sequence + 1]
            assert piece.start == at and first <= piece.start <= piece.stop <= last
            at = piece.stop
            owners[piece.start : piece.stop] += 1
            assert piece.from_left == (piece.start > first) and piece.to_right == (piece.stop < last)
            assert (piece.start - first) % CHUNK == 0
            assert not piece.from_left or i == 0
            assert not piece.to_right or i == len(s.pieces) - 1
        assert at == s.stop
        started += s.started
        ended += s.ended
    assert np.all(owners == 1)
    assert started == ended == list(range(len(bounds) - 1))


def test_shares_are_nearly_equal():
    segments = partition([0, 1000], 7)
    assert all(abs((s.stop - s.start) - 1000 / 7) <= CHUNK for s in segments)


def test_a_chain_names_the_ranks_of_a_sequence():
    segments = partition([0, 100, 400], 4, cuts=[32, 32, 228])
    assert chain(segments, 0) == [0, 2]
    assert chain(segments, 1) == [2, 3]


@pytest.mark.parametrize("cuts, part", [
    ([16], "expected 2 positions"), ([16, 8], "non-decreasing"), ([16, 500], "within"), ([15, 32], "multiples of 16"),
    ([16, 105], "multiples of 16 from the start 100 of sequence 1")])
def test_other_cuts_are_refused(cuts, part):
    with pytest.raises(InputError, match=part):
        partition([0, 100, 200], 3, cuts=cuts)


def test_any_cut_on_the_grid_is_taken():
    segments = partition([0, 100, 200], 3, cuts=[96, 116])
    assert [(s.start, s.stop) for s in segments] == [(0, 96), (96, 116), (116, 200)]
