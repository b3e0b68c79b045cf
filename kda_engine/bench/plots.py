"""Pictures of a benchmark's record: time against tokens, roofline, time over ranks. Needs matplotlib."""

from itertools import cycle
from pathlib import Path

from ..errors import InputError
from .record import OURS, peers_of
from .samples import median, quartiles


def write_plots(record, folder):
    """Write the pictures that the record has something for into the folder, as PNG; returns their paths."""
    timed = [row for row in record["rows"] if "samples" in row]
    worked = [row for row in timed if "bytes" in row]
    pictures = {}
    if record["mode"] == "collectives" and timed:
        pictures["collectives"] = lambda axes: _transfers(axes, timed)
    elif record["mode"] == "scaling" and timed:
        pictures["scaling"] = lambda axes: _scaling(axes, timed)
    elif worked:
        pictures["tokens"] = lambda axes: _over_tokens(axes, worked, record["ceilings"])
        pictures["roofline"] = lambda axes: _roofline(axes, worked, record["ceilings"])
    paths = []
    for name, draw in pictures.items():
        figure, axes = _start(record)
        draw(axes)
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
        axes.grid(True, which="major", linewidth=0.5, alpha=0.5)
        paths.append(Path(folder) / f"{name}.png")
        try:
            paths[-1].parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(paths[-1], dpi=120)
        except OSError as error:
            raise InputError(f"plot: cannot write {paths[-1]}: {error.strerror}") from None
    return paths


def require_matplotlib():
    """Raises InputError where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("plot: expected matplotlib (the extra 'plot'), which is not installed") from None


def _start(record):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"{record['machine']['name']}, {record['provenance']['utc']}", fontsize="medium")
    return figure, axes


def _over_tokens(axes, rows, ceilings):
    """One line for every side and everything that tells cases apart but their tokens."""
    lines, floors = {}, {}
    for row in rows:
        lengths, heads = row["problem"]["lengths"], row["problem"]["heads"]
        what = f"{row['case']['what']} {row['case']['regime']}, H {heads}"
        if len(lengths) > 1:
            what += f", {len(lengths)} sequences"
        floors.setdefault(what, []).append((sum(lengths), 1e3 * row["bytes"] / ceilings["bandwidth"]))
        for side in (OURS, *peers_of(row)):
            label = what if side == OURS else f"{side}: {what}"
            lines.setdefault((what, label), []).append((sum(lengths), row["samples"][side]))
    colours = {}
    for (what, label), points in lines.items():
        colour = _line(axes, points, label, "-" if label == what else "--", colours.get(what))
        colours.setdefault(what, colour)
    for what, points in floors.items():
        axes.plot(*zip(*sorted(points)), linestyle=":", marker=".", color=colours[what])
    axes.plot([], [], linestyle=":", marker=".", color="black", label="floor: bytes at the copy's rate")
    _logarithmic(axes, {tokens for points in floors.values() for tokens, _ in points})
    axes.set_xlabel("tokens")
    axes.set_ylabel("milliseconds (median, quartiles)")


def _roofline(axes, rows, ceilings):
    """FLOP/s over FLOPs per byte, under what the measured copy and matrix product allow."""
    bandwidth, rate = ceilings["bandwidth"], ceilings["matrix_rate"]
    ridge, intensity = rate / bandwidth, lambda row: row["flops"] / row["bytes"]
    ends = min(*map(intensity, rows), ridge) / 4, max(*map(intensity, rows), ridge) * 4
    axes.plot([ends[0], ridge, ends[1]], [1e-9 * bandwidth * ends[0], 1e-9 * rate, 1e-9 * rate], color="black",
              label=f"copy {bandwidth / 1e9:.4g} GB/s,\nproduct {rate / 1e9:.4g} GFLOP/s")
    groups = {}
    for row in rows:
        groups.setdefault(f"{row['case']['what']} {row['case']['regime']}", []).append(row)
    # The shapes' names stand left and right of the points in turn: forward and backward lie close together.
    for (label, group), marker, side in zip(groups.items(), cycle("osD^v"), cycle((-6, 6))):
        reached = [1e-9 * row["flops"] / median(row["samples"][OURS]) for row in group]
        places = list(zip(map(intensity, group), reached))
        axes.plot(*zip(*places), marker=marker, linestyle="", label=label)
        for row, place in zip(group, places):
            axes.annotate(row["case"]["shape"], place, xytext=(side, 0), textcoords="offset points", fontsize="x-small",
                          va="center", ha="right" if side < 0 else "left")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        _plain(axis)
    axes.set_xlabel("FLOPs per byte, both at the least")
    axes.set_ylabel("GFLOP/s")


def _transfers(axes, rows):
    """Time over ranks, a line for every transfer, transport and number of heads."""
    names = [f"{c['what']} by {c['transport']}, HV {c['heads']}" for c in (row["case"] for row in rows)]
    _over_ranks(axes, rows, names, [row["case"]["what"] for row in rows])


def _scaling(axes, rows):
    """Time over ranks, a line for every scan and transport, beside what perfect scaling would give."""
    names = [f"{c['scan']} by {c['transport']}" for c in (row["case"] for row in rows)]
    _over_ranks(axes, rows, names, names)
    start = min(rows, key=lambda row: row["case"]["ranks"])
    first, seconds = start["case"]["ranks"], median(start["samples"][OURS])
    ranks = sorted({row["case"]["ranks"] for row in rows})
    axes.plot(ranks, [1e3 * seconds * first / r for r in ranks], linestyle=":", color="black", label="perfect")


def _over_ranks(axes, rows, names, kinds):
    """A line for each name; lines of one kind have one style."""
    lines, style_of = {}, dict(zip(dict.fromkeys(kinds), cycle(("-", "--", ":", "-."))))
    for row, name, kind in zip(rows, names, kinds):
        lines.setdefault((name, kind), []).append((row["case"]["ranks"], row["samples"][OURS]))
    for (name, kind), points in lines.items():
        _line(axes, points, name, style_of[kind], None)
    _logarithmic(axes, {ranks for points in lines.values() for ranks, _ in points})
    axes.set_xlabel("ranks")
    axes.set_ylabel("milliseconds of the slowest rank (median, quartiles)")


def _line(axes, points, label, style, colour):
    """Draw (place, samples in seconds) as medians with bars from quartile to quartile; returns the colour."""
    places, samples = zip(*sorted(points))
    middles = [1e3 * median(taken) for taken in samples]
    bars = [[abs(1e3 * quartile - middle) for quartile, middle in zip(ends, middles)]
            for ends in zip(*map(quartiles, samples))]
    drawn = axes.errorbar(places, middles, bars, marker="o", markersize=4, capsize=3, linestyle=style, color=colour,
                          label=label)
    return drawn.lines[0].get_color()


def _logarithmic(axes, places):
    places = sorted(places)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places, [str(x) for x in places], rotation=0 if len(places) < 9 else 90)
    axes.xaxis.minorticks_off()
    _plain(axes.yaxis)


def _plain(axis):
    """Numbers of a logarithmic axis without exponents."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(LogFormatter())
