"""What a benchmark found: numbers for a file, and a table for a reader."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from rich.table import Table
from rich.text import Text

from chairlift import __version__
from chairlift.bench.engines import Contender
from chairlift.bench.workloads import Workload

Metrics = dict[str, float]

# Name, label, how it is written. For speeds more is better, for times and memory less.
ROWS: tuple[tuple[str, str, str], ...] = (
    ("output_tok_s", "output tok/s", "{:,.1f}"),
    ("total_tok_s", "prompt and output tok/s", "{:,.1f}"),
    ("requests_s", "requests/s", "{:,.2f}"),
    *(
        (f"{name}_{kind}", f"{name.upper()} {kind}, ms", "{:,.1f}")
        for name in ("ttft", "tpot")
        for kind in ("mean", "p50", "p99")
    ),
    ("peak_mib", "peak memory, MiB", "{:,.0f}"),
    ("agreement", "same tokens as ours", "{:.1%}"),
)


def measure(run: dict[str, Any], workload: Workload) -> Metrics:
    """The numbers of one run."""
    seconds, requests = run["seconds"], run["requests"]
    firsts = [1000 * each["first"] for each in requests]
    gaps = [
        1000 * (each["last"] - each["first"]) / (len(each["tokens"]) - 1)
        for each in requests
        if len(each["tokens"]) > 1
    ]
    found = {
        "seconds": seconds,
        "output_tok_s": workload.output_tokens / seconds,
        "total_tok_s": (workload.prompt_tokens + workload.output_tokens) / seconds,
        "requests_s": len(requests) / seconds,
    }
    for name, times in (("ttft", firsts), ("tpot", gaps)):
        if times:
            found |= {f"{name}_mean": fmean(times), f"{name}_p50": median(times), f"{name}_p99": percentile(times, 99)}
    if run["peak_bytes"] is not None:
        found["peak_mib"] = run["peak_bytes"] / (1 << 20)
    return found


def summarize(workload: Workload, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Everything but the tokens: each engine's runs, their medians, and ours over theirs."""
    ours = contenders[0]
    best = middle([measure(run, workload) for run in ours.runs])
    engines = []
    for contender in contenders:
        runs = [measure(run, workload) for run in contender.runs]
        found = middle(runs)
        shown = {"name": contender.name, "info": contender.info, "unavailable": contender.unavailable, "runs": runs}
        if runs and contender is not ours:
            found["agreement"] = agreement(ours.runs[0], contender.runs[0])
            shown["ratio"] = {key: best[key] / value for key, value in found.items() if key in best and value}
        engines.append({**shown, "median": found})
    return {
        "chairlift": __version__,
        "machine": {"processor": platform.machine(), "system": platform.system(), "python": platform.python_version()},
        "workload": {
            "name": workload.name,
            "requests": len(workload.prompts),
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
        },
        "engines": engines,
    }


def middle(runs: Sequence[Metrics]) -> Metrics:
    """The median of each number."""
    return {key: median(run[key] for run in runs) for key in runs[0]} if runs else {}


def table(summary: dict[str, Any]) -> Table:
    """Medians side by side, and the ratio ours / theirs beside each."""
    ours, *others = [each for each in summary["engines"] if each["runs"]]
    runs = len(ours["runs"])
    notes = [
        f"{ours['info']['device']}, {ours['info']['dtype']}; median of {runs} run{'s' * (runs > 1)}; "
        "a ratio is ours / theirs",
        *(f"{each['name']} is not available: {each['unavailable']}" for each in summary["engines"] if not each["runs"]),
    ]
    shown = Table(
        title="{name}: {requests:,} requests, {prompt_tokens:,} prompt and {output_tokens:,} output tokens".format(
            **summary["workload"]
        ),
        caption=Text("\n".join(notes)),
        caption_justify="left",
    )
    shown.add_column("")
    shown.add_column(ours["name"], justify="right")
    for each in others:
        shown.add_column(each["name"], justify="right")
        shown.add_column("ratio", justify="right", style="bold")
    for key, label, form in ROWS:
        if not any(key in each["median"] for each in (ours, *others)):
            continue
        cells = [form.format(ours["median"][key]) if key in ours["median"] else ""]
        for each in others:
            cells.append(form.format(each["median"][key]) if key in each["median"] else "")
            cells.append(f"{each['ratio'][key]:.2f}x" if key in each["ratio"] else "")
        shown.add_row(label, *cells)
    return shown


def agreement(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The share of tokens before two greedy answers part: rounding parts them late, other weights at once."""
    same = total = 0
    for one, other in zip(ours["requests"], theirs["requests"], strict=True):
        pairs = list(zip(one["tokens"], other["tokens"], strict=True))
        total += len(pairs)
        same += next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return same / total


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` percent are not above, between neighbours by straight line.

    >>> percentile([1, 2, 3, 4, 5], 50), percentile([0, 10], 99)
    (3.0, 9.9)
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
