"""`chairlift bench`: how fast it is, alone and beside other engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.commands.options import DEFAULT_MODEL, Model, with_settings
from chairlift.commands.screen import notes
from chairlift.core.errors import ChairliftError

app = typer.Typer(help="Measure speed.", no_args_is_help=True)


@app.command()
@with_settings
def offline(
    model: Model = "",
    shape: Annotated[
        str | None, typer.Option(help="A model's shape with random weights, such as smollm2-135m, in place of --model.")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="uniform256 (default on a GPU), cpu64 (on a CPU), uniform512, single, prefill8k, uniform, lognormal, "
            "or a JSONL file with a prompt or prompt_tokens, and output_tokens, in each line."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of uniform and lognormal.", min=1)] = 64,
    prompt_tokens: Annotated[
        str, typer.Option(help="Prompt lengths of uniform and lognormal: LOW..HIGH, one length, or MEAN:LOW..HIGH.")
    ] = "16..256",
    output_tokens: Annotated[str, typer.Option(help="Answer lengths, in the same way.")] = "16..256",
    workload_seed: Annotated[int, typer.Option(help="Another seed draws other lengths and tokens.")] = 0,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="Also run transformers, transformers-static, openvino or openvino-stateful; repeatable."),
    ] = None,
    compare_python: Annotated[
        str | None, typer.Option(help="The Python interpreter that has the other engines, if it is not this one.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Runs of each engine, in turn; medians are shown.", min=1)] = 1,
    threads: Annotated[int | None, typer.Option(help="CPU threads of each engine (default: all cores).", min=1)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every run's numbers to this file, too.")
    ] = None,
    *,
    settings: dict[str, Any],
) -> None:
    """A workload given all at once: tokens and requests per second, and how long answers take."""
    from chairlift.bench import offline, report
    from chairlift.bench.workloads import Lengths, make
    from chairlift.execution.build import choose_device

    if shape and model:
        raise ChairliftError("--shape and --model exclude each other: give one")
    if shape:
        settings["load_format"] = "dummy"
    usual = "cpu64" if choose_device(settings["device"]).type == "cpu" else "uniform256"
    lengths = Lengths.parse(prompt_tokens), Lengths.parse(output_tokens)
    benchmark = offline.Benchmark(
        shape or model or DEFAULT_MODEL,
        settings,
        lambda encode: make(workload or usual, requests, *lengths, workload_seed, encode),
        compare=compare or [],
        python=compare_python or sys.executable,
        repeat=repeat,
        threads=threads,
    )
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ChairliftError(f"{json_file} cannot be written: there is no such folder")
    made, contenders = offline.run_offline(benchmark, lambda text: notes.print(text, style="dim", markup=False))
    summary = report.summarize(made, contenders)
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=2) + "\n")
    show(report.table(summary))


@app.command()
def scheduler() -> None:
    """What the scheduler itself costs in each step, however many requests wait."""
    from rich.table import Table

    from chairlift.bench.scheduler import run

    shown = Table(title="microseconds per step")
    for column in ("running", "waiting", "plan", "apply", "step"):
        shown.add_column(column, justify="right")
    for row in run():
        shown.add_row(
            f"{row.running:,}", f"{row.waiting:,}", f"{row.plan_us:,.1f}", f"{row.apply_us:,.1f}", f"{row.step_us:,.1f}"
        )
    show(shown)


def show(table: Any) -> None:
    """Print a table whole, however narrow a pipe claims to be."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(table)
