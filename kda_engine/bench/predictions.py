"""What the design of the fused chain predicted of its parts, and what follows where a measurement says otherwise.

Docs: docs/kernels/probes.md.
"""

from dataclasses import dataclass

from .table import pipe_table

AS_PREDICTED, LESS, MORE = "as predicted", "less than predicted", "more than predicted, within the limit"


@dataclass(frozen=True)
class Prediction:
    """of: what is measured, in a unit. low, high: the predicted range. limits: (value, what follows above), rising."""

    of: str
    unit: str
    low: float
    high: float
    limits: tuple

    def verdict(self, measured):
        """What a measurement says of it."""
        for limit, consequence in reversed(self.limits):
            if measured > limit:
                return f"over {limit:,}: {consequence}"
        if measured < self.low:
            return LESS
        return AS_PREDICTED if measured <= self.high else MORE


_NARROW = ((24, "chunks of 32 tokens, for products of 64 columns"),)
_STEP = "cycles a step of 64 tokens"

# By the names that the probes give their figures. No part of a product takes less than the tensor cores' rate: 16
# cycles at 32 columns.
PREDICTIONS = {
    "product, 1 warpgroup": Prediction("products of 32 columns, one warpgroup, one accumulator", "cycles a product", 16,
                                       24, _NARROW),
    "product, 2 warpgroups": Prediction("the same, two warpgroups", "cycles a product of either", 16, 24, _NARROW),
    "preparation": Prediction("preparation alone, 8 warps", _STEP, 2130, 2800,
                              ((3600, "the fused kernel misses its goal"),)),
    "recurrence": Prediction("recurrence alone, 2 warpgroups", _STEP, 2300, 2700,
                             ((3500, "find what serialises it first"),)),
    "both": Prediction("both with their barriers", _STEP, 4800, 6400,
                       ((6400, "chunks of 32 tokens"), (7200, "the fused kernel misses its goal"))),
    "peer": Prediction("13.5 KiB to the other block every 1,400 cycles", "% more cycles of the recurrence", 0, 5,
                       ((5, "no clusters that share a preparation"),)),
}


def verdict_table(measured, crowded):
    """Markdown: every prediction beside what was measured.

    measured, crowded: figures by the names of PREDICTIONS, of a few multiprocessors (which are judged) and of all.
    """
    rows = [[x.of, x.unit, f"{x.low:,} to {x.high:,}", f"{x.limits[0][0]:,}", f"{measured[name]:,.1f}",
             f"{crowded[name]:,.1f}", x.verdict(measured[name])] for name, x in PREDICTIONS.items()]
    return pipe_table(["probe", "unit", "predicted", "limit", "measured", "on all at once", "verdict"], rows)
