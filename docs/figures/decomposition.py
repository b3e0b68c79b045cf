"""Draws the pictures of docs/decomposition.md: `python docs/figures/decomposition.py [FOLDER]`. Needs matplotlib."""

import sys
from pathlib import Path

import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure

from kda_engine.affine import Affine
from kda_engine.partition import partition
from kda_engine.scan import prefix, suffix
from mpi_runner.parallel.routes import ROUTES
from mpi_runner.prediction import Rates, predict
from mpi_runner.traffic import crossings

# The worked example: three ranks, states of one number.
M, S, D = (0.5, 0.4, 0.3), (2.0, 1.0, 3.0), (0.3, 0.5, 0.7)
INITIAL, D_FINAL = 0.0, 1.0

# Colour-blind safe: forward, backward, summary, exchange.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"

# The same bytes at every run: no date, no random identifiers.
rcParams.update({"svg.hashsalt": "kda", "font.size": 9, "svg.fonttype": "none", "font.family": "sans-serif"})


def pairs(factor=1.0, data=S):
    """The example's pairs, every M times `factor`; data: S, or D for the backward."""
    one = lambda x: np.full((1, 1), x)
    return [Affine(one(m * factor), one(x)) for m, x in zip(M, data)]


def boundaries():
    """(states at the four boundaries, gradients of states at them)"""
    states = [INITIAL, *(x.item() for x in prefix(pairs(), np.full((1, 1), INITIAL)))]
    gradients = [*(x.item() for x in suffix(pairs(data=D), np.full((1, 1), D_FINAL))), D_FINAL]
    return states, gradients


def worked_example():
    """Three ranks in a row, what each condenses to, and what passes each boundary in both directions."""
    states, gradients = boundaries()
    figure = Figure(figsize=(7.6, 2.9), layout="constrained")
    axes = figure.add_subplot(xlim=(-0.75, 3.75), ylim=(-1.55, 1.65))
    axes.set_axis_off()
    for rank in range(3):
        axes.add_patch(_box(rank + 0.16, -0.5, 0.68, 1.0))
        axes.text(rank + 0.5, 0.28, f"rank {rank}", ha="center", weight="bold")
        axes.text(rank + 0.5, 0.02, f"M = {M[rank]}", ha="center")
        axes.text(rank + 0.5, -0.18, f"S = {S[rank]:g}", ha="center", color=BLUE)
        axes.text(rank + 0.5, -0.38, f"D = {D[rank]}", ha="center", color=ORANGE)
        axes.text(rank + 0.5, 1.0, f"{M[rank]} · {states[rank]:.3g} + {S[rank]:g}", ha="center", color=BLUE, size=8)
        axes.text(rank + 0.5, -1.12, f"{M[rank]} · {gradients[rank + 1]:.3g} + {D[rank]}", ha="center", color=ORANGE,
                  size=8)
    for place, (state, gradient) in enumerate(zip(states, gradients)):
        axes.text(place, 0.68, f"{state:.3g}", ha="center", va="center", color=BLUE, weight="bold", size=11)
        axes.text(place, -0.78, f"{gradient:.3g}", ha="center", va="center", color=ORANGE, weight="bold", size=11)
    for rank in range(3):
        _arrow(axes, rank + 0.22, rank + 0.78, 0.68, BLUE)
        _arrow(axes, rank + 0.78, rank + 0.22, -0.78, ORANGE)
    axes.text(-0.7, 1.42, "forward: states, left to right", color=BLUE)
    axes.text(-0.7, -1.5, "backward: gradients of states, right to left", color=ORANGE)
    for place, text in ((0, "initial\nstate"), (3, "final\nstate")):
        side = -0.42 if place == 0 else 3.42
        axes.text(side, 0.68, text, ha="center", va="center", size=8, color=BLUE)
        axes.text(side, -0.78, text + "'s\ngradient", ha="center", va="center", size=8, color=ORANGE)
    return figure


def condensing():
    """How wide runs of tokens shrink to one pair: chunks within a rank, ranks within a sequence."""
    figure = Figure(figsize=(7.6, 2.6), layout="constrained")
    axes = figure.add_subplot(xlim=(-0.2, 12.2), ylim=(-0.35, 3.6))
    axes.set_axis_off()
    for rank in range(3):
        colour = (BLUE, GREEN, ORANGE)[rank]
        for token in range(16):
            axes.add_patch(_box(4 * rank + 0.25 * token, 0, 0.22, 0.4, colour, 0.35))
        for chunk in range(4):
            axes.add_patch(_box(4 * rank + chunk, 0.95, 0.96, 0.5, colour, 0.5))
            axes.text(4 * rank + chunk + 0.48, 1.2, "M, S", ha="center", va="center", size=7)
            axes.annotate("", (4 * rank + chunk + 0.48, 0.93), (4 * rank + chunk + 0.48, 0.42), arrowprops=_line(GREY))
        axes.add_patch(_box(4 * rank + 0.1, 2.0, 3.8, 0.5, colour, 0.7))
        axes.text(4 * rank + 2, 2.25, f"rank {rank}: one M [K, K], one S [K, V] a head", ha="center", va="center",
                  size=7)
        for chunk in range(4):
            axes.annotate("", (4 * rank + 2, 1.98), (4 * rank + chunk + 0.48, 1.47), arrowprops=_line(GREY))
    axes.annotate("", (11.9, 3.0), (0.1, 3.0), arrowprops=_line(GREY))
    axes.text(6, 3.15, "gathered by all ranks; each scans for the state in front of its own tokens", ha="center",
              size=8)
    axes.text(0, -0.28, "tokens of one sequence", size=8)
    return figure


def dropping():
    """The worked example with ever smaller M: how wrong the last rank's own S is as the final state."""
    factors = np.logspace(-7, 0, 29)
    missed = [abs(prefix(pairs(factor), np.full((1, 1), INITIAL))[-1].item() - S[-1]) for factor in factors]
    figure = Figure(figsize=(4.6, 2.7), layout="constrained")
    axes = figure.add_subplot(xlabel="M, as a multiple of the example's", ylabel="error of the final state")
    axes.loglog(factors, missed, color=BLUE)
    axes.grid(alpha=0.4)
    return figure


def scaling():
    """Predicted time over ranks of the two scans, from stated rates."""
    HV, tokens = 32, 1 << 20
    rates = Rates(forward=4e8, backward=2e8, summary=6e8, bandwidth=2e10, latency=2e-5)
    ranks = [2**n for n in range(9)]
    figure = Figure(figsize=(4.6, 2.7), layout="constrained")
    axes = figure.add_subplot(xlabel="ranks", ylabel="seconds, forward and backward")
    for scan, colour in (("serial", GREY), ("allgather", BLUE)):
        cuts = [partition(np.array([0, tokens]), count) for count in ranks]
        times = [predict(ROUTES[scan], crossings(segments, HV, 128, 128, "f4", True), rates) for segments in cuts]
        axes.plot(ranks, times, marker="o", markersize=3, color=colour, label=scan)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.grid(alpha=0.4)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _box(x, y, width, height, colour=GREY, alpha=0.2):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, alpha=alpha, edgecolor="black", linewidth=0.5)


def _line(colour):
    return {"arrowstyle": "->", "color": colour, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}


def _arrow(axes, start, stop, height, colour):
    axes.annotate("", (stop, height), (start, height), arrowprops=_line(colour))


def main(folder):
    for draw in (worked_example, condensing, dropping, scaling):
        draw().savefig(Path(folder) / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
