"""Errors as pictures: a row of panels a golden, a panel a tensor, heads against blocks of tokens or against sequences.

Needs matplotlib.
"""

import os
from math import ceil

import numpy as np

from kda_engine.errors import InputError
from kda_engine.hdf5.schema import CONV_GRADIENTS, GRADIENTS, STATE_RESULTS, TOKEN_RESULTS

# Colours span this many powers of ten below the tolerance; everything above it is red.
DECADES = 4
ROWS_A_PAGE = 8
# Labels that fit below a panel.
_LABELS = 7

PARAMETER_RESULTS = tuple(name for name in GRADIENTS if name not in TOKEN_RESULTS + STATE_RESULTS)
# In inches: the panels' widths by kind; their height, alone on a page too, with the labels below; what is around them.
_COLUMNS = {**dict.fromkeys(TOKEN_RESULTS, 1.3), **dict.fromkeys(STATE_RESULTS, 1.05),
            **dict.fromkeys(PARAMETER_RESULTS, 0.42), **dict.fromkeys(CONV_GRADIENTS, 0.42)}
_PANEL, _LONE_PANEL, _BELOW, _LEAST_WIDTH = 0.75, 1.8, 0.4, 6.0
_LEFT, _GAP, _TOP, _RIGHT = 2.1, 0.28, 0.95, 1.0


def write_heat_map(path, judgements):
    """Write a picture, PNG, PDF or SVG by the name's ending; returns the paths written.

    More goldens than fit on a page go on further pages: of one PDF, else NAME-1.png, NAME-2.png and so on.
    Raises InputError for another ending, and OSError.
    """
    shown = [judgement for judgement in judgements if any(v.blocks is not None for v in judgement.verdicts)]
    pages = [shown[first : first + ROWS_A_PAGE] for first in range(0, len(shown), ROWS_A_PAGE)] or [[]]
    stem, ending = os.path.splitext(os.fspath(path))
    if ending.lower() == ".pdf":
        from matplotlib.backends.backend_pdf import PdfPages

        with PdfPages(path) as file:
            for page in pages:
                file.savefig(_page(page))
        return [path]
    paths = [path] if len(pages) == 1 else [f"{stem}-{number}{ending}" for number in range(1, len(pages) + 1)]
    for name, page in zip(paths, pages):
        try:
            _page(page).savefig(name, dpi=110)
        except ValueError as error:
            raise InputError(f"--plot: {error}") from None
    return paths


def _page(judgements):
    """The figure. Places are reckoned here: matplotlib's own layout takes half a minute for so many panels."""
    from matplotlib.figure import Figure

    there = {v.name for judgement in judgements for v in judgement.verdicts if v.blocks is not None}
    columns = [name for name in _COLUMNS if name in there] or list(TOKEN_RESULTS)
    # One golden, or one tensor, gets a page's room.
    wider = max(1.0, _LEAST_WIDTH / sum(_COLUMNS[name] for name in columns))
    panel = _PANEL if len(judgements) > 1 else _LONE_PANEL
    widths = {name: wider * _COLUMNS[name] for name in columns}
    lefts = np.cumsum([_LEFT] + [widths[name] + _GAP for name in columns])
    row = panel + _BELOW
    width, height = lefts[-1] + _RIGHT, _TOP + row * max(1, len(judgements))
    figure = Figure(figsize=(width, height))
    add = lambda left, top, wide, high: figure.add_axes(
        (left / width, 1 - (top + high) / height, wide / width, high / height))
    image = None
    for number, judgement in enumerate(judgements):
        top = _TOP + row * number
        for left, name in zip(lefts, columns):
            verdict = next((v for v in judgement.verdicts if v.name == name and v.blocks is not None), None)
            if verdict is not None:
                image = _panel(add(left, top, widths[name], panel), verdict, judgement.cu_seqlens)
        figure.text((_LEFT - 0.3) / width, 1 - (top + panel / 2) / height,
                    f"{os.path.basename(judgement.path)}\n{judgement.tier}", fontsize=8, ha="right", va="center")
    for left, name in zip(lefts, columns):
        is_wide = widths[name] > 1
        figure.text((left + (widths[name] / 2 if is_wide else 0)) / width, 1 - (_TOP - 0.06) / height,
                    name.rpartition("/")[2], fontsize=8, rotation=0 if is_wide else 35, va="bottom",
                    ha="center" if is_wide else "left")
    if image is not None:
        bar = figure.colorbar(image, cax=add(lefts[-1] + 0.1, _TOP, 0.15, min(2.2, height - _TOP - 0.4)), extend="max")
        bar.set_label("log10(error / tolerance)\nred: beyond it", fontsize=7)
        bar.ax.tick_params(labelsize=7)
    figure.text(_LEFT / width, 1 - 0.12 / height, "Errors of each head, from below: in blocks of 64 tokens, in states, in "
                "gradients of parameters", fontsize=9, va="top")
    return figure


def _panel(panel, verdict, cu_seqlens):
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    rows, errors = verdict.blocks
    # A tolerance of 0, every bit, has no scale of its own; float32's rounding takes its place.
    tolerance = verdict.tolerance or float(np.finfo("f4").eps)
    with np.errstate(divide="ignore"):
        values = np.log10(np.where(np.isnan(errors), np.inf, errors) / tolerance)
    # Infinities are left blank by matplotlib; both ends of the colours stand for them here.
    image = panel.imshow(np.clip(values, -DECADES, 1).T, vmin=-DECADES, vmax=0, aspect="auto", interpolation="nearest",
                         origin="lower", cmap=colormaps["cividis"].with_extremes(over="red"))
    panel.tick_params(labelsize=6, length=2, pad=1)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))
    if verdict.name in TOKEN_RESULTS:
        _label_sequences(panel, rows, cu_seqlens)
    elif verdict.name in STATE_RESULTS:
        panel.xaxis.set_major_locator(MaxNLocator(nbins=_LABELS, integer=True, min_n_ticks=1))
        panel.set_xlabel("sequence", fontsize=6, labelpad=1)
    else:
        panel.set_xticks([])
    if verdict.name in CONV_GRADIENTS:
        panel.set_ylabel("channel", fontsize=6, labelpad=1)
    return image


def _label_sequences(panel, rows, cu_seqlens):
    """Below the blocks: where each sequence begins, or the tokens of the only one. rows: first rows of the blocks."""
    bounds = np.array([0]) if cu_seqlens is None else np.asarray(cu_seqlens)
    # Of sequences that begin at one row the last is the one with tokens.
    sequences = np.searchsorted(bounds, rows, side="right") - 1
    starts = np.flatnonzero(np.diff(sequences, prepend=-1))
    if len(bounds) <= 2:
        places = np.arange(0, len(rows), max(1, ceil(len(rows) / _LABELS)))
        panel.set_xticks(places, [str(rows[place]) for place in places])
        panel.set_xlabel("token", fontsize=6, labelpad=1)
        return
    for start in starts[1:]:
        panel.axvline(start - 0.5, color="white", linewidth=0.6)
    labelled = starts[:: max(1, ceil(len(starts) / _LABELS))]
    panel.set_xticks(labelled, [str(sequences[start]) for start in labelled])
    panel.set_xlabel("sequence", fontsize=6, labelpad=1)
