"""What repeated measurements of one thing say: their middle and how far they lie apart."""

import numpy as np


def median(samples):
    """The middle of the samples."""
    return float(np.median(samples))


def quartiles(samples):
    """Where the first quarter of the samples ends and the last begins."""
    first, last = np.percentile(samples, [25, 75])
    return float(first), float(last)


def interval(samples):
    """Where the median of all possible samples lies with 95 % confidence, whatever their distribution: two of the samples,
    counted from either end as the binomial distribution says.
    """
    ordered, count = np.sort(samples), len(samples)
    outside = max(0, int(count / 2 - 0.98 * np.sqrt(count)))
    return float(ordered[outside]), float(ordered[count - 1 - outside])


def uncertainty(samples):
    """Half of that interval over the median."""
    low, high = interval(samples)
    return (high - low) / 2 / median(samples)


def spread(samples):
    """The distance between the quartiles: a figure that one disturbed sample does not change."""
    first, last = quartiles(samples)
    return last - first
