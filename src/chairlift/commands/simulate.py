"""`chairlift simulate`: a trace on hardware that need not be here, under the real scheduler."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from chairlift.commands.options import with_settings
from chairlift.commands.reports import (
    JsonFile,
    OutputTokens,
    PromptTokens,
    RecordView,
    TrafficSeed,
    check_files,
    progress_bar,
    show,
    write_numbers,
)
from chairlift.core.errors import ChairliftError

if TYPE_CHECKING:
    from rich.console import Group

    from chairlift.traffic.query import Query

_LABELS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end", "step": "step, weighted by its tokens"}


def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="A recording (JSONL or CSV as Azure, Mooncake or BurstGPT publish them), or a workload: uniform, "
            "lognormal, uniform256, ..."
        ),
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model's shape, or a folder with a config.json; no weights are read.")
    ] = "llama-3.1-8b",
    hardware: Annotated[
        str, typer.Option(help="a100, h100, h200, b200, l40s, mi300x, or a file of `chairlift profile`.")
    ] = "h200",
    replicas: Annotated[int, typer.Option(help="Copies of the model, each on its own devices.", min=1)] = 1,
    routing: Annotated[
        Literal["cache-aware", "least-loaded", "session", "round-robin"],
        typer.Option(help="How requests are divided among replicas."),
    ] = "cache-aware",
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share each copy of the model.", min=1)] = 1,
    weight_bits: Annotated[Literal["16", "8", "4"], typer.Option(help="Bits of each weight.")] = "16",
    rate: Annotated[
        str | None, typer.Option(help="Requests per second, or x2 for twice the trace's own rate; inf: all at once.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Simulate only the first so many requests.", min=1)] = None,
    prompt_tokens: PromptTokens = "16..256",
    output_tokens: OutputTokens = "16..256",
    workload_seed: TrafficSeed = 0,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="A latency limit of a good answer in milliseconds, such as ttft:1000 or tpot:50; repeatable."
        ),
    ] = None,
    record_view: RecordView = None,
    json_file: JsonFile = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Simulate a trace: the scheduler that serves, with steps as long as the cost model says.

    Nothing is downloaded and no GPU is used.
    """
    from chairlift.bench.serve_report import read_targets
    from chairlift.core.settings import Settings
    from chairlift.costs.hardware import chip
    from chairlift.costs.shape import shape_of
    from chairlift.engine.record_file import RecordFile
    from chairlift.simulation.replica import Hardware
    from chairlift.simulation.run import Simulation

    check_files(json_file, record_view)
    queries = read_queries(trace, rate, requests, prompt_tokens, output_tokens, workload_seed)
    chosen = Settings.of(**settings)
    limits = {name: limit / 1000 for name, limit in read_targets(target or []).items()}
    if hardware.endswith(".json"):
        made = Hardware.read(Path(hardware), chosen)
    else:
        shape = shape_of(model, int(weight_bits), chosen.cache.kv_dtype)
        made = Hardware.of(shape, chip(hardware), chosen, tensor_parallel)
    simulation = Simulation(made, chosen, replicas=replicas, routing=routing, targets=limits)
    began = time.perf_counter()
    with ExitStack() as stack, progress_bar(len(queries)) as (notice, advance):
        notice(f"simulating {trace}")
        if record_view is not None:
            file = stack.enter_context(RecordFile(record_view, f"{trace}, simulated: {model} on {hardware}"))
            simulation.record(file, model)
        outlook = simulation.run(queries, advance)
    took = time.perf_counter() - began
    devices = replicas * tensor_parallel
    summary = {
        "trace": trace,
        "model": model,
        "hardware": hardware,
        "devices": devices,
        "kv_tokens": made.kv_tokens,
        "targets_ms": {name: 1000 * limit for name, limit in limits.items()},
        **outlook.summary(),
        "took": took,
    }
    show(tables(summary))
    write_numbers(json_file, {**summary, "series": [each.rows() for each in outlook.series]})


simulate_command = with_settings(simulate, groups=("cache", "scheduling"))


def read_queries(
    trace: str, rate: str | None, requests: int | None, prompt_tokens: str, output_tokens: str, seed: int
) -> list[Query]:
    """Return the requests of a recording or a workload, at the rate asked for."""
    from dataclasses import replace

    from chairlift.traffic.arrivals import Demand, at_rate
    from chairlift.traffic.traces import read_trace
    from chairlift.traffic.workloads import Lengths

    factor, number = read_rate(rate)
    path = Path(trace)
    if path.suffix.lower() in (".csv", ".jsonl", ".json"):
        found = read_trace(path)[:requests]
        return [replace(each, at=each.at / factor) for each in found] if factor else at_rate(found, number)
    if factor:
        raise ChairliftError(f"--rate {rate} multiplies a recording's rate, and {trace} is a workload: give a number")
    lengths = Lengths.parse(prompt_tokens), Lengths.parse(output_tokens)
    return Demand(trace, requests, *lengths, seed=seed, rate=number).queries()


def read_rate(text: str | None) -> tuple[float | None, float | None]:
    """Read a rate as (factor, None) or (None, requests per second).

    >>> read_rate("x2"), read_rate("0.5"), read_rate(None)
    ((2.0, None), (None, 0.5), (None, None))
    """
    if text is None:
        return None, None
    try:
        number = float(text.removeprefix("x"))
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ChairliftError(f"--rate is {text!r}: use requests per second such as 20, or x2 for twice the trace's own")
    return (number, None) if text.startswith("x") else (None, number)


def tables(summary: dict[str, Any]) -> Group:
    """Return the tables of totals and latencies."""
    from rich.console import Group

    from chairlift.core.words import counted
    from chairlift.report.numbers import rounded
    from chairlift.report.tables import table

    done, cached = summary["requests"], summary["cached_tokens"] / max(1, summary["prompt_tokens"])
    rows = [
        ("requests", f"{done['finished']:,} finished" + (f", {done['rejected']:,} rejected" * bool(done["rejected"]))),
        ("simulated time, s", f"{summary['seconds']:,.1f}"),
        ("requests/s", f"{summary['requests_s']:,.2f}"),
        ("output tok/s", f"{summary['output_tok_s']:,.1f}"),
        ("prompt and output tok/s", f"{summary['total_tok_s']:,.1f}"),
        ("prompt tokens found in the prefix cache", f"{cached:.1%}"),
        ("KV cache of a replica, tokens", rounded(summary["kv_tokens"])),
        ("preemptions", f"{summary['preemptions']:,}"),
        ("devices busy", f"{summary['busy']:.1%}"),
    ]
    if summary["targets_ms"]:
        limits = ", ".join(f"{_LABELS[name]} {limit:g} ms" for name, limit in summary["targets_ms"].items())
        rows.append((f"within {limits}", f"{summary['good']:.2%}"))
    times = [(_LABELS[name], *(f"{value:,.1f}" for value in found.values())) for name, found in summary["ms"].items()]
    head = f"{summary['model']} on {counted(summary['devices'], summary['hardware'])}, simulated: {summary['trace']}"
    note = f"{counted(summary['steps'], 'step')} in {summary['took']:.1f} s; step times are predicted, not measured"
    return Group(
        table(head, ("", ""), rows, is_centered=True, has_header=False),
        table("", ("ms", "mean", "p50", "p90", "p99", "max"), times, note),
    )
