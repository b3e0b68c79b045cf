"""Draws the pictures of docs/glance.md from stored records: `python docs/figures/glance.py [FOLDER]`. Needs matplotlib.

The records are the tables of docs/reports/h200.md and the JSON files of docs/reports/records.
"""

import json
import re
import sys
from pathlib import Path

from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

REPORTS = Path(__file__).resolve().parent.parent / "reports"

# Colour-blind safe.
BLUE, ORANGE, GREEN, GREY, BLACK = "#0072B2", "#D55E00", "#009E73", "#999999", "#000000"
# What rounding a result to bfloat16 costs by itself; docs/numerics.md.
ROUNDING = 1.7e-3
REGIMES = {"strong": "strong\ndecay", "weak": "weak\ndecay", "repeat": "repeated\nkeys"}

# The same bytes at every run: no date, no random identifiers.
rcParams.update({"svg.hashsalt": "kda", "font.size": 9, "svg.fonttype": "none", "font.family": "sans-serif"})


def table(page, *columns):
    """Rows of the first Markdown table of a report that has all these columns, dicts by title. Raises LookupError."""
    rows, titles = [], None
    for line in (REPORTS / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if titles is None and cells is not None and set(columns) <= set(cells):
            titles = cells
        elif titles is not None and cells is None:
            break
        elif titles is not None and not set("".join(cells)) <= set("-: "):
            rows.append(dict(zip(titles, cells)))
    if not rows:
        raise LookupError(f"{page}: expected a table with the columns {', '.join(columns)}")
    return rows


def record(name):
    return json.loads((REPORTS / "records" / f"{name}.json").read_text(encoding="utf-8"))


def token_heads(shape):
    """Tokens of all sequences times heads, of "N × T × H" or "[T, T, ...] × H"."""
    tokens, heads = shape.rsplit("×", 1)
    lengths = re.findall(r"\d+", tokens)
    count = sum(map(int, lengths)) if "[" in tokens else int(lengths[0]) * int(lengths[1])
    return count * int(heads)


def device_times():
    """Forward on one H200, every shape of the report: time over tokens times heads, beside cuDNN and the floor."""
    figure = Figure(figsize=(4.4, 3.3), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens × heads", ylabel="milliseconds, forward")
    rows = table("h200.md", "shape", "strong, ms", "weak, ms", "floor")
    # cuDNN has a column in each regime; the dictionary keeps the second one, the weak regime's.
    for name, column, style in (("this engine, weak decay", "weak, ms", {"color": BLUE, "marker": "o"}),
                                ("this engine, strong decay", "strong, ms", {"color": GREEN, "marker": "s"}),
                                ("cuDNN, weak decay", "cuDNN", {"color": ORANGE, "marker": "^"}),
                                ("floor: memory traffic", "floor", {"color": BLACK, "marker": "_"})):
        points = [(token_heads(row["shape"]), float(row[column])) for row in rows]
        axes.plot(*zip(*points), linestyle="", markersize=5, alpha=0.85, label=name, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain(axes.yaxis)
    axes.set_xlim(4e4, 1.6e6)
    axes.set_title("One H200, bfloat16, head size 128", fontsize=9)
    axes.grid(alpha=0.4)
    axes.legend(fontsize=7.5, frameon=False, loc="upper left")
    return figure


def errors():
    """The worst gradient against float64, by regime: the device's and the NumPy engine's."""
    figure = Figure(figsize=(4.4, 3.3), layout="constrained")
    axes = figure.add_subplot(ylabel="relative error, worst gradient")
    device = {tokens: {row["regime"]: _worst(row) for row in table("h200.md", "regime", "tokens", "dq", "d_initial_state")
                       if row["tokens"] == tokens} for tokens in ("512", "65536")}
    judged = {one["file"].removesuffix(".h5"): max(t["error"] for t in one["tensors"]
                                                  if t["tensor"].startswith("grads/"))
              for one in record("goldens-numpy")}
    series = [("H200, bfloat16, 65536 tokens", device["65536"], {"color": BLUE, "marker": "o"}),
              ("H200, bfloat16, 512 tokens", device["512"], {"color": BLUE, "marker": "o", "fillstyle": "none"})]
    series += [(f"NumPy, {dtype}, 512 tokens", {name: judged[f"{name}-{dtype}"] for name in REGIMES}, style)
               for dtype, style in (("float32", {"color": GREEN, "marker": "s"}),
                                    ("float64", {"color": ORANGE, "marker": "^"}))]
    for name, values, style in series:
        axes.plot(range(len(REGIMES)), [values[regime] for regime in REGIMES], linestyle="", markersize=6, label=name,
                  **style)
    axes.axhline(ROUNDING, color=GREY, linestyle=":", linewidth=1)
    axes.text(-0.42, ROUNDING * 0.6, "rounding to bfloat16 alone", fontsize=7, color="#555555", va="top")
    axes.set_yscale("log")
    axes.set_ylim(1e-16, 1e4)
    axes.set_yticks([10.0**n for n in range(-16, 0, 4)] + [1.0])
    axes.set_xlim(-0.5, 2.5)
    axes.set_xticks(range(len(REGIMES)), list(REGIMES.values()))
    axes.set_title("Accuracy", fontsize=9)
    axes.grid(alpha=0.4)
    axes.legend(fontsize=7.5, frameon=False, loc="upper left")
    return figure


def host_times():
    """The NumPy engine on a CPU: time over tokens, from a record of `bench`."""
    rows = [row for row in record("cpu-numpy")["rows"] if "samples" in row]
    figure = Figure(figsize=(4.4, 3.3), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens (4 heads)", ylabel="milliseconds")
    for what, colour in (("forward", BLUE), ("forward+backward", ORANGE)):
        points = sorted((sum(row["problem"]["lengths"]), sorted(row["samples"]["ours"])) for row in rows
                        if row["case"]["what"] == what)
        places, samples = zip(*points)
        middle, least, most = ([1e3 * taken[at] for taken in samples] for at in
                               (len(samples[0]) // 2, 0, -1))
        axes.plot(places, middle, marker="o", markersize=4, color=colour, label=what.replace("+", " and "))
        axes.fill_between(places, least, most, color=colour, alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places, [str(x) for x in places])
    axes.xaxis.minorticks_off()
    _plain(axes.yaxis)
    axes.set_title("NumPy engine, one thread, float32", fontsize=9)
    axes.grid(alpha=0.4)
    axes.legend(fontsize=7.5, frameon=False, loc="upper left")
    return figure


def ranks():
    """Time over ranks on GPUs, beside what perfect scaling would give."""
    rows = table("h200.md", "ranks", "strong, certified, ms", "weak, exact, ms")
    figure = Figure(figsize=(4.4, 3.3), layout="constrained")
    axes = figure.add_subplot(xlabel="ranks, one H200 each", ylabel="milliseconds, forward and backward")
    counts = [int(row["ranks"]) for row in rows]
    most = 0.0
    for column, colour in (("strong, certified, ms", GREEN), ("weak, exact, ms", BLUE)):
        times = [float(row[column]) for row in rows]
        most = max(most, *times)
        axes.plot(counts, times, marker="o", markersize=4, color=colour, label=column.removesuffix(", ms"))
        axes.plot(counts, [times[0] * counts[0] / count for count in counts], linestyle=":", color=colour)
    axes.set_xticks(counts)
    axes.set_ylim(0, 1.35 * most)
    axes.set_title("131072 tokens, 32 heads, in one sequence", fontsize=9)
    axes.grid(alpha=0.4)
    handles, _ = axes.get_legend_handles_labels()
    handles.append(Line2D([], [], linestyle=":", color=BLACK, label="perfect scaling"))
    axes.legend(handles=handles, fontsize=7.5, frameon=False, loc="upper left")
    return figure


def _worst(row):
    return max(float(value) for name, value in row.items() if name.startswith("d"))


def _plain(axis):
    """Numbers of a logarithmic axis without exponents."""
    axis.set_major_formatter("{x:g}")


def main(folder):
    for draw in (device_times, errors, host_times, ranks):
        draw().savefig(Path(folder) / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
