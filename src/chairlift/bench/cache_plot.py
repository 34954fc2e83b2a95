"""A picture of how many blocks are found in caches of several sizes, drawn from the numbers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from chairlift.bench.plots import COLORS, FAINT, INK, LOOK, PAPER, headed, save
from chairlift.core.words import counted

_HEIGHT = 3.4
_SHOWN = 0.16  # of the width, for the names at the right


def draw(trace: dict[str, Any], file: Path) -> None:
    """Write the picture; the file's ending says in which format."""
    with matplotlib.rc_context(LOOK):
        save(_figure(trace), file)


def _figure(trace: dict[str, Any]) -> Figure:
    told = (
        f"{trace['name']}: {counted(trace['requests'], 'request')}, {counted(trace['distinct'], 'distinct block')} of "
    )
    figure = headed("Blocks found in the cache, by its size", f"{told}{trace['block_tokens']} tokens", _HEIGHT)
    axes = figure.add_axes((0.06, 0.19, 0.93 - _SHOWN, 0.6))
    rows, blocks = trace["sizes"], trace["blocks"]
    sizes = [row["size"] for row in rows]
    lines = {name: [100 * row["hits"][name] / blocks for row in rows] for name in rows[0]["hits"]}
    lines["optimum"] = [100 * row["optimum"] / blocks for row in rows]
    most = 100 * trace["infinite"] / blocks
    axes.axhline(most, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate(" no limit", (sizes[0], most), va="bottom", color=FAINT)
    for (name, values), color in zip(lines.items(), (*COLORS[: len(lines) - 1], INK), strict=True):
        axes.plot(sizes, values, color=color, linewidth=1.5, marker="o", markersize=3, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sizes, [f"{size:,}\n{size / trace['distinct']:.0%}" for size in sizes])
    axes.set_xlabel("blocks, and how many of the distinct ones that is")
    axes.set_ylim(0, 1.15 * most)
    axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.grid(axis="y", color=PAPER)
    figure.legend(loc="center right", frameon=False, labelcolor="linecolor", reverse=True)
    return figure
