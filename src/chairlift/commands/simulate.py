"""`chairlift simulate`: a trace on hardware that need not be here, under the real scheduler."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from chairlift.commands.options import with_settings
from chairlift.commands.reports import (
    Burstiness,
    JsonFile,
    OutputTokens,
    PromptTokens,
    RecordView,
    TrafficSeed,
    check_files,
    progress_bar,
    show,
    write_numbers,
    write_text,
)
from chairlift.commands.screen import notes
from chairlift.commands.traffic import Arrivals, Duration, Rate, Trace, read_traffic
from chairlift.core.errors import ChairliftError

if TYPE_CHECKING:
    from rich.console import Group

    from chairlift.core.settings import Settings
    from chairlift.simulation.replica import Hardware

DEFAULT_SHAPE = "llama-3.1-8b"
_LABELS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end", "step": "step, weighted by its tokens"}


def simulate(
    trace: Trace,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="A model's shape, or a folder with a config.json; no weights are read (default: llama-3.1-8b).",
        ),
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="a100, h100, h200, b200, l40s, mi300x, or a file of `chairlift profile`.")
    ] = "h200",
    replicas: Annotated[
        int | None, typer.Option(help="Copies of the model, each on its own devices (default: 1).", min=1)
    ] = None,
    role: Annotated[
        str,
        typer.Option(
            help="Compute prompts and answers in different replicas, as chairlift serve does: how many for each, such "
            "as prefill=1,decode=2.",
            metavar="ROLES",
        ),
    ] = "both",
    kv_link: Annotated[
        float | None,
        typer.Option(
            help="With --role: gigabytes a second from one replica to another (default: the chip's link to its host).",
        ),
    ] = None,
    routing: Annotated[
        Literal["cache-aware", "least-loaded", "session", "round-robin"],
        typer.Option(help="How requests are divided among replicas."),
    ] = "cache-aware",
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Devices that share each copy of the model (default: 1).", min=1)
    ] = None,
    weight_bits: Annotated[
        Literal["16", "8", "4"] | None, typer.Option(help="Bits of each weight (default: 16).")
    ] = None,
    rate: Rate = None,
    arrivals: Arrivals = "poisson",
    burstiness: Burstiness = None,
    duration: Duration = None,
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
    html: Annotated[
        Path | None,
        typer.Option(help="Write a report with plots of latencies, batch and KV cache over time to this HTML file."),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(help="Write steps and requests to this JSON file, which ui.perfetto.dev shows on a time axis."),
    ] = None,
    record_view: RecordView = None,
    json_file: JsonFile = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Simulate a trace: the scheduler that serves, with steps as long as the cost model says.

    Nothing is downloaded and no GPU is used.
    """
    from dataclasses import replace

    from chairlift.bench.serve_report import read_targets
    from chairlift.core.settings import Settings
    from chairlift.engine.record_file import RecordFile
    from chairlift.routing.pools import roles_of
    from chairlift.simulation.html import report
    from chairlift.simulation.run import Simulation
    from chairlift.simulation.trace_file import TraceFile

    check_files(json_file, record_view, html, perfetto)
    lengths = prompt_tokens, output_tokens
    traffic = read_traffic(trace, rate, requests, *lengths, workload_seed, arrivals, burstiness, duration)
    chosen = Settings.of(**settings)
    limits = {name: limit / 1000 for name, limit in read_targets(target or []).items()}
    model, made = _model_on(hardware, model, tensor_parallel, weight_bits, chosen)
    roles = roles_of(role, replicas)
    if kv_link is not None:
        if not kv_link > 0:
            raise ChairliftError(f"--kv-link is {kv_link:g}: use gigabytes a second above 0")
        if len(set(roles)) == 1:
            raise ChairliftError(
                "--kv-link is the link from prefill to decode replicas, and all replicas have one role: add --role "
                "prefill=1,decode=1, or leave --kv-link out"
            )
        made = replace(made, link=1e9 * kv_link)
    simulation = Simulation(made, chosen, roles=roles, routing=routing, targets=limits)
    began = time.perf_counter()
    with ExitStack() as stack, progress_bar(traffic.count) as (notice, advance):
        notice(f"simulating {trace}")
        if record_view is not None:
            file = stack.enter_context(RecordFile(record_view, f"{trace}, simulated: {model} on {hardware}"))
            simulation.record(file, model)
        events = None if perfetto is None else stack.enter_context(TraceFile(perfetto))
        if events is not None:
            events.watch(simulation)
        outlook = simulation.run(traffic.queries, advance)
    took = time.perf_counter() - began
    devices = len(roles) * (tensor_parallel or 1)
    summary = {
        "trace": trace,
        "model": model,
        "hardware": hardware,
        "devices": devices,
        "roles": roles,
        "settings": settings,
        "kv_tokens": made.kv_tokens,
        "targets_ms": {name: 1000 * limit for name, limit in limits.items()},
        **outlook.summary(),
        "took": took,
    }
    show(tables(summary))
    write_numbers(json_file, {**summary, "series": [each.rows() for each in outlook.series]})
    if events is not None and events.is_full:
        notes.print(
            f"{perfetto} has the first {events.most:,} events: later steps and requests are left out",
            style="dim",
            markup=False,
        )
    if html is not None:
        write_text(html, report(summary, outlook))


simulate_command = with_settings(simulate, groups=("cache", "scheduling"))


def _model_on(
    hardware: str, model: str | None, ranks: int | None, bits: str | None, settings: Settings
) -> tuple[str, Hardware]:
    """Return a model's name, and its step times on chips or as they were measured."""
    from chairlift.costs.hardware import chip
    from chairlift.costs.shape import ranks_of, shape_of
    from chairlift.json_file import read_json
    from chairlift.simulation.replica import Hardware

    kv_dtype = settings.cache.kv_dtype
    if not hardware.endswith(".json"):
        model, ranks = model or DEFAULT_SHAPE, ranks or 1
        ranks_of(model, [ranks])
        return model, Hardware.of(shape_of(model, int(bits or 16), kv_dtype), chip(hardware), settings, ranks)
    made = Hardware.read(Path(hardware), settings)
    kind = None if kv_dtype == "auto" else kv_dtype
    for flag, value in (("model", model), ("tensor-parallel", ranks), ("weight-bits", bits), ("kv-dtype", kind)):
        if value is not None:
            raise ChairliftError(
                f"--{flag} is {value}, and {hardware} has the step times of one model as it was measured: leave "
                f"--{flag} out, or name a chip"
            )
    return str(read_json(Path(hardware)).get("shape", "a measured model")), made


def tables(summary: dict[str, Any]) -> Group:
    """Return the tables of totals and latencies."""
    from rich.console import Group

    from chairlift.core.words import counted
    from chairlift.report.numbers import rounded, scaled
    from chairlift.report.tables import table

    done, cached = summary["requests"], summary["cached_tokens"] / max(1, summary["prompt_tokens"])
    rows = [
        ("requests", f"{done['finished']:,} finished" + (f", {done['rejected']:,} rejected" * bool(done["rejected"]))),
        ("simulated time, s", f"{summary['seconds']:,.1f}"),
        ("requests/s", f"{summary['requests_s']:,.2f}"),
        ("output tok/s", f"{summary['output_tok_s']:,.1f}"),
        ("prompt and output tok/s", f"{summary['total_tok_s']:,.1f}"),
        ("prompt tokens", f"{summary['prompt_tokens']:,}"),
        ("output tokens", f"{summary['output_tokens']:,}"),
        ("peak concurrency", f"{summary['peak_concurrency']:,}"),
        ("prompt tokens found in the prefix cache", f"{cached:.1%}"),
        ("KV cache of a replica, tokens", rounded(summary["kv_tokens"])),
        ("preemptions", f"{summary['preemptions']:,}"),
        *([("KV sent to decode replicas", scaled(summary["sent_bytes"], "B"))] if summary["sent_bytes"] else []),
        ("devices busy", f"{summary['busy']:.1%}"),
    ]
    if summary["targets_ms"]:
        limits = ", ".join(f"{_LABELS[name]} {limit:g} ms" for name, limit in summary["targets_ms"].items())
        rows.append((f"goodput, requests/s (within {limits})", f"{summary['good_s']:,.2f} ({summary['good']:.2%})"))
    times = [(_LABELS[name], *(f"{value:,.1f}" for value in found.values())) for name, found in summary["ms"].items()]
    head = f"{summary['model']} on {counted(summary['devices'], summary['hardware'])}, simulated: {summary['trace']}"
    note = f"{counted(summary['steps'], 'step')} in {summary['took']:.1f} s; step times are predicted, not measured"
    parts = [
        table(head, ("", ""), rows, is_centered=True, has_header=False),
        table("", ("ms", "mean", "p50", "p90", "p99", "max"), times, note),
    ]
    if summary["rejections"]:
        reasons = [(f"{each['requests']:,}", each["example"]) for each in summary["rejections"]]
        parts.append(table("", ("rejected", "for example"), reasons, labels=2))
    return Group(*parts)
