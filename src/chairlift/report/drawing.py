"""The style of all pictures: colors, titles and legends; importing it needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import LayoutEngine
from matplotlib.patches import Patch

WIDTH = 8.0  # inches of 100 pixels
LEGEND_COLUMNS = 4
COLORS = ("#4C78A8", "#F58518", "#54A24B", "#E45756", "#72B7B2", "#B279A2", "#9D755D", "#EECA3B")
PAPER, INK, FAINT = "#F2F2F2", "#333333", "#8A8A8A"
LOOK: dict[Any, Any] = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "chairlift",
}


def draw(file: Path, picture: Callable[..., Figure | None], *numbers: Any) -> bool:
    """Draw a picture of the numbers to a file; return False if they are too few. The suffix sets the format."""
    with matplotlib.rc_context(LOOK):
        figure = picture(*numbers)
        if figure is None:
            return False
        metadata = {"Date": None} if file.suffix == ".svg" else None  # the same numbers give the same bytes
        figure.savefig(file, dpi=100, facecolor="white", metadata=metadata)
    return True


def titled(head: str, subtitle: str, height: float, layout: LayoutEngine | None = None) -> Figure:
    """Return an empty figure with a title and a subtitle."""
    figure = Figure(figsize=(WIDTH, height), layout=layout)
    figure.text(0.012, 1 - 0.1 / height, head, fontsize=12, va="top")
    figure.text(0.012, 1 - 0.37 / height, subtitle, fontsize=9, color=FAINT, va="top")
    return figure


def legend(figure: Figure, colored: Mapping[str, str]) -> None:
    """Add a legend of names by color under the title."""
    shown = figure.legend(
        handles=[Patch(color=color, label=name) for name, color in colored.items()],
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.55 / figure.get_figheight()),
        ncols=LEGEND_COLUMNS,
        frameon=False,
        labelcolor="linecolor",
        handlelength=0.8,
        handleheight=0.8,
        borderpad=0.4,
        fontsize=9,
    )
    shown.set_in_layout(False)


def colors(count: int) -> Sequence[str]:
    """Return a color for each of `count` items."""
    return [COLORS[place % len(COLORS)] for place in range(count)]


def note(axes: Axes, text: str) -> None:
    """Add a note at the right end of the title line."""
    axes.set_title(text, loc="right", fontsize=9, color=FAINT)
