"""Differences of tensors as a table for people and as values for JSON."""

import math

from kda_engine.hdf5.matching import place

HEAD = ("tensor", "error", "tolerance", "worst block", "where", "")


def table_row(name, difference, tolerance, cu_seqlens):
    """One tensor's cells."""
    where = place(name, difference.worst_at, cu_seqlens)
    if difference.nonfinite:
        where = f"{difference.nonfinite} values not finite, the first at {difference.first_nonfinite}"
    return (name, f"{difference.relative:.2e}", f"{tolerance:.0e}", f"{difference.worst:.2e}", where,
            "ok" if difference.within(tolerance) else "FAIL")


def failure_row(name, why):
    """The cells of a tensor that cannot be compared: only one side has it, or the shapes differ."""
    return (name, "-", "-", "-", why, "FAIL")


def render(rows):
    """The table as text; no lines of its own beside the head's."""
    widths = [max(len(row[column]) for row in (HEAD, *rows)) for column in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (HEAD, *rows))


def as_json(name, difference, tolerance, cu_seqlens):
    """The same as JSON values; what is not finite becomes null."""
    number = lambda x: x if math.isfinite(x) else None
    return {"tensor": name, "error": number(difference.relative), "tolerance": tolerance,
            "peak": number(difference.peak), "worst": number(difference.worst),
            "where": place(name, difference.worst_at, cu_seqlens), "nonfinite": difference.nonfinite,
            "first_nonfinite": difference.first_nonfinite, "pass": difference.within(tolerance)}
