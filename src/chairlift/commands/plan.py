"""`chairlift plan`: the cheapest configurations that hold latency targets on a trace."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.commands.options import duration as seconds
from chairlift.commands.reports import (
    Burstiness,
    JsonFile,
    OutputTokens,
    PromptTokens,
    TrafficSeed,
    check_files,
    progress_bar,
    show,
    write_numbers,
    write_text,
)
from chairlift.commands.traffic import Arrivals, Duration, Rate, Trace, read_traffic
from chairlift.core.errors import ChairliftError
from chairlift.core.words import counted

if TYPE_CHECKING:
    from rich.console import Group

    from chairlift.simulation.planning import Candidate, Plan, Point, Verdict

# Approximate prices of an hour in dollars, in the cloud, in 2025: give your own with --price.
_PRICES = {"a100": 1.8, "h100": 2.8, "h200": 3.5, "b200": 5.5, "l40s": 1.0, "mi300x": 2.5}
_LABELS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}


def plan(
    trace: Trace,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model's shape, or a folder with a config.json; no weights are read.")
    ] = "llama-3.1-8b",
    hardware: Annotated[str, typer.Option(help="The chips to consider, separated by commas.")] = "h200",
    ttft_p99: Annotated[
        float | None, typer.Option(parser=seconds, metavar="TIME", help="The first token of 99% of all answers.")
    ] = None,
    tpot_p99: Annotated[
        float | None, typer.Option(parser=seconds, metavar="TIME", help="The time per output token of 99%.")
    ] = None,
    e2e_p99: Annotated[
        float | None, typer.Option(parser=seconds, metavar="TIME", help="The whole answer of 99%.")
    ] = None,
    tensor_parallel: Annotated[
        str, typer.Option(help="Devices per copy to consider, separated by commas.")
    ] = "1,2,4,8",
    weight_bits: Annotated[str, typer.Option(help="Bits of a weight to consider: 16, 8, 4.")] = "16",
    kv_dtype: Annotated[str, typer.Option(help="KV dtypes to consider: auto, fp8, int8.")] = "auto",
    price: Annotated[
        list[str] | None, typer.Option(help="Price of a device's hour, such as h200=3.5; repeatable.")
    ] = None,
    rate: Rate = None,
    arrivals: Arrivals = "poisson",
    burstiness: Burstiness = None,
    duration: Duration = None,
    requests: Annotated[int | None, typer.Option(help="Plan for only the first so many requests.", min=1)] = None,
    prompt_tokens: PromptTokens = "16..256",
    output_tokens: OutputTokens = "16..256",
    workload_seed: TrafficSeed = 0,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the capacity curves, requests a second against p99, to this SVG file."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Find the cheapest configurations that hold latency targets on a trace, by simulating them.

    It tries chips, devices per copy, formats, policies and replicas, on all cores, and prints ready command lines.
    """
    from chairlift.core.settings import Settings
    from chairlift.costs.shape import ranks_of, shape_of
    from chairlift.simulation.planning import busiest, candidates, capacity_curve, rate_of, search
    from chairlift.simulation.workers import started

    targets = {"ttft": ttft_p99, "tpot": tpot_p99, "e2e": e2e_p99}
    wanted = {name: limit for name, limit in targets.items() if limit is not None}
    if not wanted:
        raise ChairliftError("there is no target to hold: give --ttft-p99 1s, --tpot-p99 50ms or --e2e-p99 10s")
    for name, limit in wanted.items():
        if not 0 < limit < inf:
            raise ChairliftError(f"--{name}-p99 is {limit:g}: use a time above 0, such as 1s or 50ms")
    check_files(json_file, plot)
    if plot is not None and plot.suffix != ".svg":
        raise ChairliftError(f"--plot is {plot}, and capacity curves are drawn as SVG: use a name that ends in .svg")
    prices = read_prices(price or [])
    lengths = prompt_tokens, output_tokens
    traffic = read_traffic(trace, rate, requests, *lengths, workload_seed, arrivals, burstiness, duration)
    queries = list(traffic.queries)
    formats = [
        (bits, kind) for bits in _numbers("weight-bits", weight_bits, (16, 8, 4)) for kind in kv_dtype.split(",")
    ]
    shapes = {(bits, kind): shape_of(model, bits, kind) for bits, kind in formats}
    for kind in kv_dtype.split(","):
        Settings.of(kv_dtype=kind)  # an unknown one is refused here, before a process is started
    names = hardware.split(",")
    ranks = ranks_of(model, _numbers("tensor-parallel", tensor_parallel, range(1, 65)))
    found = list(candidates(shapes, names, ranks))
    if not found:
        raise ChairliftError(f"{model} fits on none of {hardware} with --tensor-parallel {tensor_parallel}: allow more")

    def cost(candidate: Candidate) -> float:
        return candidate.devices * prices[candidate.hardware]

    count = min(len(found), os.cpu_count() or 1)
    with (
        tempfile.TemporaryDirectory(prefix="chairlift-plan-") as folder,
        started(count, Path(folder), queries, shapes, wanted) as workers,
        ThreadPoolExecutor(count) as threads,
        progress_bar(2 * len(found)) as (notice, advance),
    ):
        notice(f"simulating {counted(len(found), 'placement')} of {model}")
        made = search(found, workers.check, cost, wanted, threads, advance)
        busy = rate_of(busiest(queries))
        curves = {}
        if made.holding and busy and (plot or json_file):
            notice("simulating other rates")
            for label, each in compared(made, model):
                curves[label] = capacity_curve(workers.at_rate, each, busy, wanted, threads)
    show(tables(made, model, trace, cost))
    numbers = {label: [asdict(point) for point in points] for label, points in curves.items()}
    write_numbers(json_file, {**_numbers_of(made, model, cost), "curves": numbers})
    if plot is not None and curves:
        write_text(plot, curves_picture(curves, wanted))
    for verdict in made.holding[:1]:
        print(verdict.candidate.command(model))


def _numbers(flag: str, text: str, known: Any) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = [-1]
    if any(each not in known for each in found):
        raise ChairliftError(f"--{flag} is {text!r}: use numbers separated by commas, such as 1,2,4")
    return found


def read_prices(texts: list[str]) -> dict[str, float]:
    """Read prices as h200=3.5 over the known ones.

    >>> read_prices(["h200=3"])["h200"]
    3.0
    """
    found = dict(_PRICES)
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            found[name] = -1.0
        if name not in _PRICES or not 0 <= found[name] < inf:
            raise ChairliftError(f"--price is {text!r}: use a chip and its price, such as h200=3.5")
    return found


def tables(made: Plan, model: str, trace: str, cost: Any) -> Group:
    """Return the table of what holds, and of what does not and why."""
    from rich.console import Group

    from chairlift.report.tables import table

    shown = [
        (
            verdict.candidate.command(model),
            f"{verdict.candidate.devices} {verdict.candidate.hardware}",
            f"{cost(verdict.candidate):.2f}",
            *(_p99(verdict, name) for name in verdict.strain),
            f"{verdict.summary['busy']:.0%}",
        )
        for verdict in made.holding
    ]
    names = list((made.holding or made.failing)[0].strain)
    heads = ("serves it", "devices", "$/h", *(f"{_LABELS[name]} p99, ms" for name in names), "busy")
    parts = [table(f"{model}: what holds on {trace}", heads, shown)] if shown else []
    broken = [(_describe(verdict), _reason(verdict)) for verdict in made.failing]
    if broken:
        parts.append(table("what does not hold", ("configuration", "breaks first"), broken, labels=2))
    return Group(*parts)


def compared(made: Plan, model: str) -> list[tuple[str, Candidate]]:
    """Return the configurations of the capacity plot: the cheapest, and its placement with default settings."""
    best = made.holding[0].candidate
    plain = replace(best, settings=(), role_split=None, replicas=len(best.roles))
    found = [(best.command(model), best)]
    return found if plain == best else [*found, (plain.command(model), plain)]


def curves_picture(curves: Mapping[str, Sequence[Point]], targets: Mapping[str, float]) -> str:
    """Return a plot of each target's 99th percentile by requests a second."""
    from chairlift.report.svg import chart, stacked

    return stacked(
        [
            chart(
                f"{_LABELS[name]} at the 99th percentile",
                "ms",
                {
                    label: [(point.rate, point.ms[name]) for point in points if name in point.ms]
                    for label, points in curves.items()
                },
                x_label="requests a second",
                is_log=True,
                is_marked=True,
                limits={f"target: {1000 * limit:g} ms": 1000 * limit},
            )
            for name, limit in targets.items()
        ]
    )


def _describe(verdict: Verdict) -> str:
    each = verdict.candidate
    chosen = "".join(f", {name.replace('_', '-')} {value}" for name, value in each.settings)
    split = "" if each.role_split is None else ", {} prefill to {} decode".format(*each.role_split)
    placed = f"{each.devices} {each.hardware}, {each.ranks} a copy, {each.bits}-bit weights, KV {each.kv_dtype}"
    return placed + chosen + split


def _p99(verdict: Verdict, name: str) -> str:
    """Return a latency of an answer; empty if no answer has it, as TPOT if all have one token."""
    found = verdict.summary["ms"].get(name)
    return f"{found['p99']:,.0f}" if found else ""


def _reason(verdict: Verdict) -> str:
    name = verdict.breaks_first
    if not isfinite(verdict.strain[name]):
        rejected = verdict.summary["requests"]["rejected"]
        return f"{counted(rejected, 'request')} rejected: longer than the model's context or the KV cache"
    return f"{_LABELS[name]} p99 is {_p99(verdict, name)} ms, {verdict.strain[name]:.1f}x of its target"


def _numbers_of(made: Plan, model: str, cost: Any) -> dict[str, Any]:
    def row(verdict: Verdict) -> dict[str, Any]:
        each = verdict.candidate
        return {
            "command": each.command(model),
            "hardware": each.hardware,
            "devices": each.devices,
            "price": cost(each),
            "strain": {name: share if isfinite(share) else None for name, share in verdict.strain.items()},
            "summary": verdict.summary,
        }

    return {"holding": [row(each) for each in made.holding], "failing": [row(each) for each in made.failing]}
