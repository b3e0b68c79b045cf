"""Sizes on the command line: numbers with units, and limits that are judged before anything is allocated."""

import argparse
import re

from kda_engine.errors import InputError

from . import resources

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
HELP = "K, M and G behind a number stand for 2^10, 2^20 and 2^30"

# Far beyond any machine; below, no sum of bytes leaves 64 bits and every answer takes seconds.
LARGEST = {"tokens": 1 << 44, "sequences": 1 << 20, "heads": 1 << 16, "value_heads": 1 << 16, "K": 1 << 16, "V": 1 << 16,
           "ranks": 1 << 16, "ranks_per_node": 1 << 16}
LARGEST_BYTES = 1 << 62
# Of a table over ranks and heads.
LARGEST_TABLE = 1 << 26


def whole_number(text):
    """"8192", "64K" or "1M" as an int, for argparse."""
    found = re.fullmatch(r"\s*([+-]?[0-9]{1,30})\s*([KMG]?)\s*", text, re.ASCII | re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a whole number as 8192, 64K or 1M, got {text[:40]!r}")
    return int(found[1]) * UNITS[found[2].upper()]


def check_sizes(sizes):
    """sizes: by name, as in LARGEST. Raises InputError for one beyond that."""
    for name, number in sizes.items():
        if number > LARGEST[name]:
            raise InputError(f"{name}: expected at most {LARGEST[name]}, got {number}")


def check_boundaries(HV, K, V, ranks):
    """Raises InputError where the boundaries of all ranks are more than can be counted, or listed."""
    held = 8 * HV * K * (K + V) * ranks * ranks
    if held > LARGEST_BYTES or HV * ranks > LARGEST_TABLE:
        raise InputError(f"ranks: expected fewer for {HV} value heads of {K} x {V}, got {ranks}: their boundaries are "
                         "more than a plan covers")


def check_allocation(what, needed):
    """what: the options that ask for so many bytes of memory. Raises InputError where this machine has less."""
    available = resources.memory_available()
    if needed > (LARGEST_BYTES if available is None else available):
        raise InputError(f"{what}: expected values that fit this machine's memory, got about {needed} bytes of them "
                         f"where {available} are available")
