"""Shares on the command line."""

from kda_engine.errors import InputError


def parse_share(name, text):
    """0.05 from "5%" or "0.05". Raises InputError, which names the option."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise InputError(f"{name}: expected a share such as 5% or 0.05, got {text!r}")
    return share
