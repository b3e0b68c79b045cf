"""Differences of tensors as a table for people and as values for JSON."""

import math

from kda_engine.hdf5.matching import place as block_place

from .colour import paint

HEAD = ("tensor", "error", "tolerance", "worst block", "peak", "where", "")
COLOURS = {"ok": "green", "FAIL": "red"}


def table_row(name, difference, tolerance, cu_seqlens, first_bad=None):
    """One tensor's cells. first_bad: index of the first value that is too far off, where somebody looked."""
    return (name, f"{difference.relative:.2e}", f"{tolerance:.0e}" if tolerance else "0", f"{difference.worst:.2e}",
            f"{difference.peak:.2e}", place(name, difference, first_bad, cu_seqlens),
            "ok" if difference.within(tolerance) else "FAIL")


def failure_row(name, why):
    """The cells of a tensor that cannot be compared: only one side has it, or the shapes differ."""
    return (name, "-", "-", "-", "-", why, "FAIL")


def place(name, difference, first_bad, cu_seqlens):
    """Where to look: values that are not finite, the worst block, the first value too far off."""
    if difference.nonfinite:
        return f"{difference.nonfinite} values not finite, the first at {difference.first_nonfinite}"
    where = block_place(name, difference.worst_at, cu_seqlens)
    return where if first_bad is None else "; ".join(filter(None, (where, f"first bad value at {first_bad}")))


def render(rows):
    """The table as text; no lines of its own beside the head's. Verdicts are coloured on a terminal."""
    widths = [max(len(row[column]) for row in (HEAD, *rows)) for column in range(len(HEAD) - 1)]
    lines = []
    for *cells, verdict in (HEAD, *rows):
        padded = [cell.ljust(width) for cell, width in zip(cells, widths)]
        lines.append("  ".join([*padded, paint(verdict, COLOURS.get(verdict))]).rstrip())
    return "\n".join(lines)


def as_json(name, difference, tolerance, cu_seqlens, first_bad=None):
    """The same as JSON values; what is not finite becomes null."""
    number = lambda x: x if math.isfinite(x) else None
    return {"tensor": name, "error": number(difference.relative), "tolerance": tolerance,
            "peak": number(difference.peak), "worst": number(difference.worst),
            "where": block_place(name, difference.worst_at, cu_seqlens), "nonfinite": difference.nonfinite,
            "first_nonfinite": difference.first_nonfinite, "first_bad": first_bad,
            "pass": difference.within(tolerance)}
