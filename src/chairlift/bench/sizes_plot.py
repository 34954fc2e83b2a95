"""A picture of tokens a second by batch size, beside what memory allows, drawn from the numbers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from chairlift.bench.plots import COLORS, FAINT, LOOK, PAPER, headed, save
from chairlift.bench.sizes import title

_HEIGHT = 3.6
_LABELED = (1, 2, 5)  # times a power of ten, on the axis of speeds


def draw(summary: dict[str, Any], file: Path) -> None:
    """Write the picture; the file's ending says in which format."""
    with matplotlib.rc_context(LOOK):
        save(picture(summary), file)


def picture(summary: dict[str, Any]) -> Figure:
    """Two lines on logarithmic axes: what was measured, and the floor."""
    figure = headed("Output tokens a second, by batch size", title(summary), _HEIGHT)
    axes = figure.add_axes((0.09, 0.14, 0.76, 0.66))
    rows = summary["sizes"]
    sizes = [row["size"] for row in rows]
    speeds, floors = ([row[name] for row in rows] for name in ("output_tok_s", "floor_tok_s"))
    axes.plot(sizes, floors, color=FAINT, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.plot(sizes, speeds, color=COLORS[0], linewidth=1.5, marker="o", markersize=3)
    for row in rows:
        place = (row["size"], row["output_tok_s"])
        share = f"{row['floor_share']:.0%}"
        axes.annotate(share, place, (0, -7), textcoords="offset points", ha="center", va="top", color=COLORS[0])
    for name, values, color in (("the floor", floors, FAINT), ("Chairlift", speeds, COLORS[0])):
        axes.annotate(name, (sizes[-1], values[-1]), (8, 0), textcoords="offset points", va="center", color=color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    low, high = 0.5 * min(speeds + floors), 1.3 * max(speeds + floors)
    powers = [10.0**power for power in range(-3, 9)]
    ticks = [step * power for power in powers for step in _LABELED if low <= step * power <= high]
    axes.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.set_ylim(low, high)
    axes.set_xlabel("sequences in the batch")
    axes.set_ylabel("output tokens a second")
    axes.grid(axis="y", color=PAPER)
    return figure
