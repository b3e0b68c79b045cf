"""Errors as a picture: a row of panels a golden, a panel a tensor, heads against blocks. Needs matplotlib."""

import os

import numpy as np

from kda_engine.errors import InputError
from kda_engine.hdf5.schema import TOKEN_RESULTS

# Colours span this many powers of ten below the tolerance; everything above it is red.
DECADES = 4


def write_heat_map(path, judgements):
    """Write a PNG, PDF or SVG, by the name's ending. Raises InputError for another one, and OSError."""
    from matplotlib.figure import Figure

    shown = [judgement for judgement in judgements if any(v.blocks is not None for v in judgement.verdicts)]
    figure = Figure(figsize=(1.5 + 2.1 * len(TOKEN_RESULTS), 1.2 + 1.25 * max(1, len(shown))), layout="constrained")
    panels = figure.subplots(max(1, len(shown)), len(TOKEN_RESULTS), squeeze=False)
    for row in panels:
        for panel in row:
            panel.set_axis_off()
    image = None
    for row, judgement in zip(panels, shown):
        for panel, name in zip(row, TOKEN_RESULTS):
            for verdict in judgement.verdicts:
                if verdict.name == name and verdict.blocks is not None:
                    image = _panel(panel, verdict)
        row[0].text(-0.3, 0.5, f"{os.path.basename(judgement.path)}\n{judgement.tier}", transform=row[0].transAxes,
                    fontsize=8, ha="right", va="center")
    for panel, name in zip(panels[0], TOKEN_RESULTS):
        panel.set_title(name, fontsize=9)
    if image is not None:
        bar = figure.colorbar(image, ax=panels, shrink=min(1.0, 4 / len(shown)), pad=0.01, extend="max")
        bar.set_label("log10(error / tolerance)\nred: beyond it", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    figure.supxlabel("block of 64 tokens", fontsize=8)
    figure.supylabel("head", fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise InputError(f"--plot: {error}") from None


def _panel(panel, verdict):
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    rows, errors = verdict.blocks
    # A tolerance of 0, every bit, has no scale of its own; float32's rounding takes its place.
    tolerance = verdict.tolerance or float(np.finfo("f4").eps)
    with np.errstate(divide="ignore"):
        values = np.log10(np.where(np.isnan(errors), np.inf, errors) / tolerance)
    # Infinities are left blank by matplotlib; both ends of the colours stand for them here.
    image = panel.imshow(np.clip(values, -DECADES, 1).T, vmin=-DECADES, vmax=0, aspect="auto", interpolation="nearest",
                         cmap=colormaps["cividis"].with_extremes(over="red"))
    panel.set_axis_on()
    panel.tick_params(labelsize=6, length=2)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    return image
