"""What a benchmark found: numbers for a file, and a table for a reader."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

from rich.table import Table
from rich.text import Text

from chairlift import __version__
from chairlift.bench.engines import Contender
from chairlift.bench.workloads import Workload
from chairlift.core.words import counted

Metrics = dict[str, float]

# Name, label, how it is written. For speeds more is better, for times and memory less.
ROWS: tuple[tuple[str, str, str], ...] = (
    ("output_tok_s", "output tok/s", "{:,.1f}"),
    ("prompt_tok_s", "prompt tok/s", "{:,.1f}"),
    ("total_tok_s", "prompt and output tok/s", "{:,.1f}"),
    ("token_ms", "ms a token", "{:,.3f}"),
    ("floor_share", "of the physical floor", "{:.1%}"),
    ("requests_s", "requests/s", "{:,.2f}"),
    *(
        (f"{name}_{kind}", f"{name.upper()} {kind}, ms", "{:,.1f}")
        for name in ("ttft", "tpot")
        for kind in ("mean", "p50", "p99")
    ),
    ("peak_mib", "peak memory, MiB", "{:,.0f}"),
    ("agreement", "same tokens as ours", "{:.1%}"),
)


STEP_LABELS = {
    "plan": "plan",
    "submit": "submit: metadata and launches (on a CPU, the pass itself)",
    "wait": "wait for the device",
    "copy": "read the tokens",
    "apply": "apply",
    "rest": "hand tokens out, and the loop",
    "host": "the host's part: all but waiting",
    "step": "the whole step",
}


def measure(run: dict[str, Any], workload: Workload, floor_s: float | None = None) -> Metrics:
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
        "prompt_tok_s": workload.prompt_tokens / seconds,
        "total_tok_s": (workload.prompt_tokens + workload.output_tokens) / seconds,
        "requests_s": len(requests) / seconds,
    }
    if len(requests) == 1:
        found["token_ms"] = 1000 * seconds / workload.output_tokens
    if floor_s is not None:
        found["floor_share"] = floor_s / seconds
    for name, times in (("ttft", firsts), ("tpot", gaps)):
        if times:
            found |= {f"{name}_mean": fmean(times), f"{name}_p50": median(times), f"{name}_p99": percentile(times, 99)}
    if run["peak_bytes"] is not None:
        found["peak_mib"] = run["peak_bytes"] / (1 << 20)
    return found


def summarize(workload: Workload, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Everything but the tokens: each engine's runs, their medians, and ours over theirs."""
    ours = contenders[0]
    floor_s = ours.info.get("floor_s")
    best = middle([measure(run, workload, floor_s) for run in ours.runs])
    engines = []
    for contender in contenders:
        runs = [measure(run, workload, floor_s) for run in contender.runs]
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
    work = summary["workload"]
    runs = len(ours["runs"])
    notes = [
        f"{ours['info']['device']}, {ours['info']['dtype']}; median of {counted(runs, 'run')}; "
        "a ratio is ours / theirs",
        *(f"{each['name']} is not available: {each['unavailable']}" for each in summary["engines"] if not each["runs"]),
    ]
    shown = Table(
        title=f"{work['name']}: {counted(work['requests'], 'request')}, {work['prompt_tokens']:,} prompt and "
        f"{counted(work['output_tokens'], 'output token')}",
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


def orientation(summary: dict[str, Any]) -> Iterator[str]:
    """What the machine allows, and how long the start took."""
    info, workload = summary["engines"][0]["info"], summary["workload"]
    if "floor_s" in info:
        seconds, rates = info["floor_s"], info["rates"]
        yield (
            f"the floor: {seconds:.3g} s, that is {workload['output_tokens'] / seconds:,.0f} output or "
            f"{workload['prompt_tokens'] / seconds:,.0f} prompt tok/s, at {scaled(rates['read_bytes_s'], 'B/s')} read "
            f"and {scaled(rates['flops_s'], 'FLOP/s')}, both measured in this run"
        )
    if "start" in info:
        imported, loaded, first = (info["start"][name] for name in ("imported", "loaded", "first_token"))
        yield (
            f"first token {first:.1f} s after the start: imports {imported:.1f}, the model and all that is made ready "
            f"{loaded - imported:.1f}, the first answer {first - loaded:.1f}"
        )


def steps_table(steps: dict[str, Any]) -> Table:
    """What a step costs the host, by part."""
    shown = Table(
        title=f"microseconds a step: {counted(steps['steps'], 'step')} with 90% to all of "
        f"{counted(steps['sequences'], 'sequence')}"
    )
    shown.add_column("")
    shown.add_column("median", justify="right")
    shown.add_column("p95", justify="right")
    for name, values in steps["parts"].items():
        if name == "host":
            shown.add_section()
        shown.add_row(STEP_LABELS[name], f"{values['median']:,.0f}", f"{values['p95']:,.0f}")
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


def scaled(value: float, unit: str) -> str:
    """A figure of three digits with the prefix that suits it.

    >>> scaled(4.2371e12, "B/s"), scaled(0.0000051, "s"), scaled(31e9, "B/s")
    ('4.24 TB/s', '5.1 µs', '31 GB/s')
    """
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}".rstrip()
    return f"{value / 1e-9:.3g} n{unit}"
