"""Pictures of the measurements, drawn from their JSON numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import log
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator

from chairlift.bench.compare_report import middle_run, title
from chairlift.core.words import counted
from chairlift.report.drawing import COLORS, FAINT, INK, LEGEND_COLUMNS, PAPER, colors, draw, legend, note, titled

HEAD = 0.65  # inches for the title
LIGHTEST, DARKEST = (0.78, 0.87, 0.95), (0.10, 0.24, 0.42)  # of a short answer and of a long one

Summary = dict[str, Any]


def draw_all(summary: Summary, folder: Path, kind: str = "svg") -> list[Path]:
    """Draw every picture that a comparison has enough numbers for, and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{name}.{kind}": picture for name, picture in PICTURES.items()}
    return [file for file, picture in files.items() if draw(file, picture, summary)]


def cache_hits(trace: Summary) -> Figure:
    """Draw the hit rate on a trace by cache size."""
    subtitle = (
        f"{trace['name']}: {counted(trace['requests'], 'request')}, {counted(trace['distinct'], 'distinct block')} of "
    )
    figure = titled("Hit rate by cache size", f"{subtitle}{counted(trace['block_tokens'], 'token')}", 3.4)
    axes = figure.add_axes((0.06, 0.19, 0.77, 0.6))
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
    axes.set_xlabel("cache size in blocks, and as a share of the distinct blocks")
    axes.set_ylim(0, 1.15 * most)
    axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.grid(axis="y", color=PAPER)
    figure.legend(loc="center right", frameon=False, labelcolor="linecolor", reverse=True)
    return figure


def batch_sizes(summary: Summary, subtitle: str) -> Figure:
    """Draw measured output tokens per second and the floor by batch size, on logarithmic axes."""
    figure = titled("Output tokens a second, by batch size", subtitle, 3.6)
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
    ticks = [step * power for power in powers for step in (1, 2, 5) if low <= step * power <= high]
    axes.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.set_ylim(low, high)
    axes.set_xlabel("sequences in the batch")
    axes.set_ylabel("output tokens a second")
    axes.grid(axis="y", color=PAPER)
    return figure


# ---- a comparison


def throughput(summary: Summary) -> Figure:
    """Draw speed and mean latency: a bar for each cell."""
    cells = [cell for cell in summary["cells"] if cell["runs"]]
    figure = sheet(summary, "Speed and latency", 0.34 * len(cells) + 0.3)
    speed, wait = figure.subplots(1, 2, sharey=True)
    for axes, key, unit, form in (
        (speed, "output_tok_s", "output tokens per second", "{:,.0f}"),
        (wait, "e2e_mean", "mean milliseconds from request to last token", "{:,.0f}"),
    ):
        values = [cell["median"][key] for cell in cells]
        bars = axes.barh(range(len(cells)), values, height=0.62, color=colors(len(cells)))
        labels = [form.format(value) for value in values]
        if key == "output_tok_s":
            labels = [f"{text}  {value / values[0]:.2f}x" for text, value in zip(labels, values, strict=True)]
        axes.bar_label(bars, labels, padding=4)
        axes.set_xlim(0, 1.32 * max(values))
        axes.set_title(unit, loc="left", fontsize=9)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(left=False)
    speed.set_yticks(range(len(cells)), [cell["name"] for cell in cells])
    speed.invert_yaxis()
    return figure


def utilization(summary: Summary) -> Figure:
    """Draw the batch size of each pass, relative to its limit, and its tokens."""

    def occupancy(axes: Axes, cell: Summary, color: Any) -> None:
        steps = middle_run(cell)["steps"]
        shares = [100 * count / summary["seats"] for count in steps["sequences"]]
        axes.fill_between(*stairs(steps, shares), color=color, linewidth=0)
        axes.set_ylim(0, 104)
        axes.set_yticks([0, 50, 100], ["0", "50", "100%"])
        axes.set_ylabel("batch full")
        found = middle_run(cell)["metrics"]
        note(axes, f"{found['occupancy']:.0%} full, {found['passes']:,.0f} passes")

    def tokens(axes: Axes, cell: Summary, color: Any) -> None:
        steps = middle_run(cell)["steps"]
        axes.plot(*stairs(steps, steps["tokens"]), color=color, linewidth=0.8)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0.8, 2 * max(max(middle_run(each)["steps"]["tokens"]) for each in ours(summary)))
        axes.set_ylabel("tokens")
        note(axes, f"{middle_run(cell)['metrics']['tokens_per_pass']:,.1f} on average")

    return small_multiples(summary, "How full each pass is: sequences, and tokens", [occupancy, tokens])


def batch_slots(summary: Summary) -> Figure:
    """Draw the requests in each slot of the batch over time."""
    asks = summary["workload"]["requests"]
    paint, named = stay_colors(asks)

    def stays(axes: Axes, cell: Summary, color: Any) -> None:
        rows: dict[int, list[tuple[float, float, Any]]] = {}
        for ask, request in zip(asks, middle_run(cell)["requests"], strict=True):
            for slot, began, ended in request["stays"]:
                rows.setdefault(slot, []).append((began, ended - began, paint(ask)))
        count = summary["seats"]
        axes.set_facecolor(PAPER)
        for slot, row in rows.items():
            bars = [(began, width) for began, width, _ in row]
            edge = 0.4 if count <= 64 else 0.0
            faces = [face for _, _, face in row]
            axes.broken_barh(bars, (slot + 0.06, 0.88), facecolors=faces, edgecolor="white", linewidth=edge)
        axes.set_ylim(count, 0)
        axes.set_yticks([0.5, count - 0.5], ["1", str(count)])
        axes.set_ylabel("slot", labelpad=-4)
        note(axes, f"{middle_run(cell)['metrics']['seconds']:,.2f} s")

    head = "Requests in each slot of the batch. " + ("Grey: empty." if named else "Darker: a longer answer.")
    height = min(3.0, 0.6 + 0.08 * float(summary["seats"]))
    figure = small_multiples(summary, head, [stays], height, legend_height=0.3 if named else 0.0)
    legend(figure, named)
    return figure


def latency(summary: Summary) -> Figure:
    """Draw the distributions of latencies over requests."""
    cells = ours(summary)
    lines = -(-len(cells) // LEGEND_COLUMNS)
    figure = sheet(summary, "Share of requests with a latency of at most ...", 2.7, legend_height=0.2 * lines + 0.1)
    plots = figure.subplots(1, 3, sharey=True)
    measures: dict[str, Callable[[Summary], float | None]] = {
        "to the first token, s": lambda request: request["first"] - request["at"],
        "for each next token, ms": lambda request: (
            1000 * (request["last"] - request["first"]) / (request["tokens"] - 1) if request["tokens"] > 1 else None
        ),
        "longest gap between two, ms": lambda request: 1000 * request["gap"] if request["tokens"] > 1 else None,
    }
    for axes, (label, measured) in zip(plots, measures.items(), strict=True):
        for cell, color in zip(cells, colors(len(cells)), strict=True):
            values = sorted(value for each in middle_run(cell)["requests"] if (value := measured(each)) is not None)
            shares = [100 * (place + 1) / len(values) for place in range(len(values))]
            axes.step([0, *values], [0, *shares], where="post", color=color, linewidth=1.5)
        axes.set_title(label, loc="left", fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 102)
        axes.grid(axis="y", color=PAPER)
    plots[0].set_yticks([0, 50, 95], ["0", "50", "95%"])
    legend(figure, {cell["name"]: color for cell, color in zip(cells, colors(len(cells)), strict=True)})
    return figure


def fairness(summary: Summary) -> Figure | None:
    """Draw the tokens computed for each tenant over time."""
    tenants = sorted({ask["tenant"] for ask in summary["workload"]["requests"]})
    if len(tenants) < 2:
        return None

    def lines(axes: Axes, cell: Summary, as_share: bool) -> None:
        run = middle_run(cell)
        ends = [at + seconds for at, seconds in zip(run["steps"]["at"], run["steps"]["seconds"], strict=True)]
        for name, color in zip(tenants, COLORS, strict=False):
            sums = list(accumulate(run["service"][name]))
            values = [100 * value / sums[-1] for value in sums] if as_share else sums
            axes.plot([0, *ends], [0, *values], color=color, linewidth=1.5)
        axes.set_ylim(bottom=0)
        if as_share:
            axes.set_yticks([0, 50, 100], ["0", "50", "100%"])
        else:
            axes.yaxis.set_major_formatter("{x:,.0f}")

    def tokens(axes: Axes, cell: Summary, color: Any) -> None:
        lines(axes, cell, as_share=False)
        axes.set_ylabel("tokens")

    def shares(axes: Axes, cell: Summary, color: Any) -> None:
        lines(axes, cell, as_share=True)
        axes.set_ylabel("share")

    head = "Tokens computed for each tenant, and as a share of its total"
    figure = small_multiples(summary, head, [tokens, shares], height=1.2, legend_height=0.3)
    legend(figure, dict(zip(tenants, COLORS, strict=False)))
    return figure


PICTURES: dict[str, Callable[[Summary], Figure | None]] = {
    "throughput": throughput,
    "utilization": utilization,
    "seats": batch_slots,
    "latency": latency,
    "fairness": fairness,
}


def small_multiples(
    summary: Summary,
    head: str,
    columns: Sequence[Callable[[Axes, Summary, Any], None]],
    height: float = 1.0,
    legend_height: float = 0.0,
) -> Figure:
    """Draw a row for each cell, on a common time axis."""
    cells = ours(summary)
    figure = sheet(summary, head, (height + 0.3) * len(cells) + 0.3, legend_height)
    plots = figure.subplots(len(cells), len(columns), sharex=True, squeeze=False)
    longest = max(middle_run(cell)["metrics"]["seconds"] for cell in cells)
    for row, cell, color in zip(plots, cells, colors(len(cells)), strict=True):
        row[0].set_title(cell["name"], loc="left", fontsize=10, color=INK)
        for axes, fill in zip(row, columns, strict=True):
            fill(axes, cell, color)
            axes.set_xlim(0, 1.01 * longest)
    for axes in plots[-1]:
        axes.set_xlabel("seconds")
    return figure


def sheet(summary: Summary, head: str, height: float, legend_height: float = 0.0) -> Figure:
    """Return an empty figure with a title and room for a legend."""
    total = height + HEAD + legend_height
    return titled(head, title(summary), total, ConstrainedLayoutEngine(rect=(0, 0, 1, height / total)))


def ours(summary: Summary) -> list[Summary]:
    """Return the cells with recorded steps; at least one has run."""
    return [cell for cell in summary["cells"] if cell["runs"] and cell["choices"]]


def stairs(steps: Summary, values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the points of a step function over the passes."""
    times: list[float] = []
    heights: list[float] = []
    for at, seconds, value in zip(steps["at"], steps["seconds"], values, strict=True):
        times += (at, at + seconds)
        heights += (value, value)
    return times, heights


def stay_colors(asks: Sequence[Summary]) -> tuple[Callable[[Summary], Any], dict[str, str]]:
    """Return a request's color, and the legend: by tenant, by kind, or darker for longer answers."""
    groups = {sort: sorted({ask[sort] for ask in asks}) for sort in ("tenant", "kind")}
    varying = next((sort for sort, found in groups.items() if 1 < len(found) <= LEGEND_COLUMNS), None)
    if varying is not None:
        colored = dict(zip(groups[varying], COLORS, strict=False))
        return lambda ask: colored[ask[varying]], colored
    low = log(min(ask["length"] for ask in asks))
    span = log(max(ask["length"] for ask in asks)) - low or 1.0

    def shade(ask: Summary) -> tuple[float, ...]:
        place = (log(ask["length"]) - low) / span
        return tuple(light + place * (dark - light) for light, dark in zip(LIGHTEST, DARKEST, strict=True))

    return shade, {}
