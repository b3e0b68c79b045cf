"""How the CUDA backward cuts a problem into slabs: every token once, on the chunk grid of its sequence."""

import numpy as np
import pytest

pytest.importorskip("cupy")

from kda_engine.engines.cuda_backward import cut_slabs  # noqa: E402
from kda_engine.layout import CHUNK  # noqa: E402

PROBLEMS = [(70,), (33, 16, 48, 5), (0, 20, 17), (20, 0, 17), (20, 17, 0), (0, 0, 16, 0, 0, 0, 31, 1, 0, 0),
            (1, 7, 16, 2, 40, 0, 3, 15, 17, 1, 1, 29)]


@pytest.mark.parametrize("chunks", (1, 2, 3, 1000))
@pytest.mark.parametrize("lengths", PROBLEMS)
def test_slabs_hold_every_token_once(lengths, chunks):
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    slabs = cut_slabs(cu_seqlens, chunks)
    assert slabs[0].tokens.start == 0 and slabs[-1].tokens.stop == cu_seqlens[-1]
    for before, after in zip(slabs, slabs[1:]):
        assert before.tokens.stop == after.tokens.start
    for slab in slabs:
        here = slab.cu_seqlens + slab.tokens.start
        assert len(here) == slab.sequences.stop - slab.sequences.start + 1
        assert np.sum(-(-np.diff(here) // CHUNK)) <= chunks
        starts = cu_seqlens[slab.sequences]
        stops = cu_seqlens[slab.sequences.start + 1 : slab.sequences.stop + 1]
        # A piece starts on its sequence's grid, and only the sequence's end is off it.
        assert np.all((here[:-1] >= starts) & ((here[:-1] - starts) % CHUNK == 0))
        assert np.all((here[1:] == stops) | ((here[1:] - starts) % CHUNK == 0))


@pytest.mark.parametrize("lengths", ((), (0,), (0, 0, 0)))
def test_no_token_no_slab(lengths):
    assert cut_slabs(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), 4) == []
