"""Colour, on terminals only."""

import os
import sys

from .launched import launched

CODES = {"green": 32, "red": 31}


def paint(text, colour):
    """The text in that colour (a key of CODES, or None) where standard output is a terminal; plain elsewhere.

    https://no-color.org: NO_COLOR, set to anything, turns it off.
    """
    # Open MPI gives its ranks a terminal of their own, wherever their output goes in the end.
    if colour is None or os.environ.get("NO_COLOR") or launched() or not sys.stdout.isatty():
        return text
    return f"\033[{CODES[colour]}m{text}\033[0m"
