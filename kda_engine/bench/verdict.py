"""Whether one run is slower than another: the ratio of medians, and how sure the samples make it."""

from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from .record import OURS, case_name
from .samples import median

# Resamples of the bootstrap, and the share of them that the interval holds.
RESAMPLES, CONFIDENCE = 10_000, 0.95

SLOWER, WITHIN, FASTER, AMBIGUOUS = "slower", "slower within the limit", "faster", "ambiguous"


@dataclass(frozen=True)
class Verdict:
    """Of one case: seconds before and after, their ratio after / before with its interval, and what follows."""

    name: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    word: str


def ratio_interval(before, after, seed=0):
    """The interval of median(after) / median(before), by resampling each side's samples."""
    random = np.random.default_rng(seed)
    medians = [np.median(random.choice(np.asarray(side), (RESAMPLES, len(side))), axis=1) for side in (before, after)]
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(medians[1] / medians[0], [tail, 100 - tail])
    return float(low), float(high)


def judge(name, before, after, limit):
    """The Verdict on two lists of samples. limit: how much slower is still allowed, 0.05 for 5 %."""
    middle = median(before), median(after)
    ratio, (low, high) = middle[1] / middle[0], ratio_interval(before, after)
    if low <= 1 <= high:
        word = AMBIGUOUS
    elif ratio > 1 + limit:
        word = SLOWER
    else:
        word = WITHIN if ratio > 1 else FASTER
    return Verdict(name, *middle, ratio, low, high, word)


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
            verdicts.append(judge(name, row["samples"][OURS], other["samples"][OURS], limit))
    return verdicts
