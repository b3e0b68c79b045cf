"""The probes' figures, verdicts and chunks; no device."""

import numpy as np
import pytest

pytest.importorskip("cupy")

from kda_engine.bench.predictions import AS_PREDICTED, LESS, MORE, PREDICTIONS, verdict_table  # noqa: E402
from kda_engine.bench.probe_chunks import SLOTS, draw_chunks, expected, raw_slots  # noqa: E402
from kda_engine.bench.probes import PHASES, product_row, products_table  # noqa: E402
from kda_engine.layout import CHUNK  # noqa: E402


@pytest.mark.parametrize("name, measured, verdict", (
    ("preparation", 2500, AS_PREDICTED), ("preparation", 2800, AS_PREDICTED), ("preparation", 2000, LESS),
    ("preparation", 3600, MORE), ("preparation", 3601, "over 3,600: the fused kernel misses its goal"),
    ("both", 6400, AS_PREDICTED), ("both", 6500, "over 6,400: chunks of 32 tokens"),
    ("both", 7201, "over 7,200: the fused kernel misses its goal"),
    ("product, 1 warpgroup", 24, AS_PREDICTED), ("peer", -0.2, LESS), ("peer", 4.9, AS_PREDICTED),
    ("peer", 5.1, "over 5: no clusters that share a preparation")))
def test_verdict(name, measured, verdict):
    assert PREDICTIONS[name].verdict(measured) == verdict


def test_verdict_table_has_a_row_for_every_prediction():
    figures = {name: 1000.0 for name in PREDICTIONS}
    head, rule, *rows = verdict_table(figures, {name: 2000.0 for name in PREDICTIONS}).splitlines()
    assert len(rows) == len(PREDICTIONS)
    assert all(row.count("|") == head.count("|") == rule.count("|") for row in rows)
    assert "| 3,600 | 1,000.0 | 2,000.0 | less than predicted |" in rows[2]


def test_ranges_and_limits_are_in_order():
    for x in PREDICTIONS.values():
        assert x.low <= x.high <= x.limits[0][0] and list(x.limits) == sorted(x.limits)


def test_what_a_round_costs_beside_its_products_does_not_count():
    latency = 100
    row = product_row(32, 2, [latency + count * {"one": 48, "several": 32}[kind] for count, kind in PHASES])
    assert (row["one"], row["several"], row["eight"]) == (24, 16, latency + 8 * 48)
    assert products_table([row]).splitlines()[-1] == "| 32 | 2 | 16 | 24.0 | 16.0 | 484 |"


def test_a_slot_holds_its_chunk_swizzled():
    case = draw_chunks()
    slots = raw_slots(case)
    assert slots.shape == (SLOTS, 4 * CHUNK * 128)
    tiles = slots.reshape(SLOTS, 8, CHUNK, 8, 8)
    for tile, (name, first) in enumerate((("k", 0), ("q", 0), ("k", 64), ("q", 64), ("g", 0), ("g", 64), ("v", 0),
                                          ("v", 64))):
        for slot, row, column in ((0, 0, 0), (3, 5, 17), (11, 15, 63)):
            place = column // 8 ^ row % 8
            value = getattr(case, name)[slot * CHUNK + row, 0, first + column]
            assert tiles[slot, tile, row, place, column % 8] == value.view("u2")


def test_chunks_come_in_turn():
    case = draw_chunks()
    once, _ = expected(case, 1, 11)
    turned, state = expected(case, 12, 11)
    # The last chunk is the first once more, from another state.
    assert turned.shape == once.shape and not np.array_equal(turned, once) and np.isfinite(state).all()
    longer, _ = expected(case, 2, 1)
    assert not np.array_equal(longer, expected(case, 2, 2)[0])
