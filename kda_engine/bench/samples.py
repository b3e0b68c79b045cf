"""What repeated measurements of one thing say: their middle and how far they lie apart."""

import numpy as np


def median(samples):
    """The middle of the samples."""
    return float(np.median(samples))


def quartiles(samples):
    """Where the first quarter of the samples ends and the last begins."""
    first, last = np.percentile(samples, [25, 75])
    return float(first), float(last)


def spread(samples):
    """The distance between the quartiles: a figure that one disturbed sample does not change."""
    first, last = quartiles(samples)
    return last - first
