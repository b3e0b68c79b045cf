"""Bytes that one rank hands to others: the one rule by which transfers count and plans predict."""


def gathered(nbytes, ranks):
    """Of a contribution of `nbytes` that every other rank receives."""
    return nbytes * (ranks - 1)


def summed(nbytes, ranks):
    """Of an array that is summed over all ranks: each takes a part of it, sums it and hands the sum on."""
    return 2 * nbytes * (ranks - 1) // ranks
