"""Whether one run is slower than another: the ratio of medians, and how sure the samples make it.

What else runs on a machine, and its clocks, change between two runs, and no sample of either tells. So a record also
holds a control, the same work every time, measured in turn with the case: the ratio is divided by the control's.
"""

from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from .record import CONTROL, OURS, case_name
from .samples import median

# Resamples of the bootstrap, and the share of them that the interval holds.
RESAMPLES, CONFIDENCE = 10_000, 0.95

SLOWER, WITHIN, FASTER, AMBIGUOUS = "slower", "slower within the limit", "faster", "ambiguous"


@dataclass(frozen=True)
class Verdict:
    """Of one case: median seconds before and after; control: how many times as long the control took after as before
    (1 where there was none); ratio: after / before / control, with its interval; word: what follows."""

    name: str
    before: float
    after: float
    control: float
    ratio: float
    low: float
    high: float
    word: str


def judge(name, before, after, limit, seed=0):
    """The Verdict on two dicts of samples by side. limit: how much slower is still allowed, 0.05 for 5 %.

    The interval is a percentile bootstrap: every side's samples are drawn again and again, with `seed`.
    """
    sides = [side for side in (OURS, CONTROL) if side in before and side in after]
    random = np.random.default_rng(seed)
    ratios, resampled = {}, 1.0
    for side in sides:
        ratios[side] = median(after[side]) / median(before[side])
        drawn = _resample(after[side], random) / _resample(before[side], random)
        resampled = drawn / resampled if side == OURS else resampled / drawn
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    control = ratios.get(CONTROL, 1.0)
    ratio = ratios[OURS] / control
    if low <= 1 <= high:
        word = AMBIGUOUS
    elif ratio > 1 + limit:
        word = SLOWER
    else:
        word = WITHIN if ratio > 1 else FASTER
    return Verdict(name, median(before[OURS]), median(after[OURS]), control, ratio, float(low), float(high), word)


def _resample(samples, random):
    """Medians of RESAMPLES draws, each of as many samples as there are, with replacement."""
    return np.median(random.choice(np.asarray(samples), (RESAMPLES, len(samples))), axis=1)


def compare_records(before, after, limit):
    """Verdicts on all cases that both records timed, in the first one's order.

    Raises InputError when the records are of different machines, or the same case stands for different problems.
    """
    for part in ("mode", "machine"):
        if before[part] != after[part]:
            raise InputError(f"{part}: expected the same in both records, got {before[part]} and {after[part]}")
    others = {case_name(row): row for row in after["rows"]}
    verdicts = []
    for row in before["rows"]:
        name, other = case_name(row), others.get(case_name(row))
        if other is None:
            continue
        if row["problem"] != other["problem"]:
            raise InputError(f"{name}: expected the same problem in both records, got {row['problem']} and "
                             f"{other['problem']}")
        if "samples" in row and "samples" in other:
            verdicts.append(judge(name, row["samples"], other["samples"], limit))
    return verdicts
