"""`chairlift compare`: scheduling settings side by side, on the same requests."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from chairlift.commands import reports
from chairlift.commands.options import with_model, with_settings
from chairlift.commands.screen import notes
from chairlift.core.errors import ChairliftError
from chairlift.core.settings import options

_CHOICES = {found.name: " ".join(found.metadata["choices"]) for _, found in options()}


def _axis(name: str, help: str) -> Any:
    """Return a repeatable flag, one axis of the grid of runs."""
    return typer.Option(help=f"{help}: {_CHOICES.get(name, '')}; repeatable.", rich_help_panel="The grid")


@with_settings
@with_model("")
def compare(
    batching: Annotated[list[str] | None, _axis("batching", "When requests join the batch")] = None,
    prefill: Annotated[list[str] | None, _axis("prefill", "How prompts share a step with decodes")] = None,
    policy: Annotated[list[str] | None, _axis("policy", "Order in which requests are admitted")] = None,
    predictor: Annotated[list[str] | None, _axis("predictor", "How the length of an answer is predicted")] = None,
    preemption: Annotated[list[str] | None, _axis("preemption", "How a preempted sequence gets its KV back")] = None,
    naive: Annotated[
        bool,
        typer.Option("--naive", help="Also run transformers' generate on padded batches.", rich_help_panel="The grid"),
    ] = False,
    shape: Annotated[
        str | None, typer.Option(help="A model's shape with random weights, such as smollm2-135m, in place of --model.")
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="halves, lognormal12, homogeneous, tenants, flood, priorities, deadlines, longprompt, or one of "
            "`chairlift bench`: uniform, lognormal, cpu64, a JSONL file."
        ),
    ] = "halves",
    requests: Annotated[
        int | None, typer.Option(help="Number of requests (default: the workload's own).", min=1)
    ] = None,
    prompt_tokens: reports.PromptTokens = "16..256",
    output_tokens: reports.OutputTokens = "16..256",
    workload_seed: reports.TrafficSeed = 0,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second (default: all at once, or a recording's own).")
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="poisson, constant, burst, or a recording, which gives the lengths too.")
    ] = "poisson",
    burstiness: reports.Burstiness = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds to submit for; later requests are dropped.", min=0)
    ] = None,
    deadline: Annotated[
        float,
        typer.Option(
            help="Shortest deadline of the workload deadlines, in seconds; others are 2, 4 and 8 times as long.", min=0
        ),
    ] = 2.0,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="max_tokens of every request with --hidden-lengths (default: above the longest answer).", min=1
        ),
    ] = None,
    rehearse: Annotated[
        int, typer.Option(help="Requests to run first, unmeasured, so that a predictor has learned.", min=0)
    ] = 0,
    only: Annotated[str | None, typer.Option(help="Run this tenant's requests alone, as a baseline.")] = None,
    lengths_are_known: Annotated[
        bool | None,
        typer.Option(
            "--known-lengths/--hidden-lengths",
            help="Whether max_tokens is an answer's true length (default: known where only the batching is compared).",
        ),
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option(help="Sequences in one batch (default: 16, and 17 for longprompt).", min=1)
    ] = None,
    repeat: Annotated[int, typer.Option(help="Runs of each cell, interleaved; medians are shown.", min=1)] = 1,
    output: Annotated[Path | None, typer.Option(help="Draw pictures and write numbers.json in this folder.")] = None,
    picture: Annotated[Literal["svg", "png"], typer.Option(help="The pictures' format.")] = "svg",
    record_view: reports.RecordView = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers, with each request and step, to this file.")
    ] = None,
    *,
    model: str,
    settings: dict[str, Any],
) -> None:
    """Run one workload with every combination of scheduling settings on this machine, and compare them.

    Answer lengths are hidden from the scheduler, as in production; only the oracle predictor knows them.
    """
    from chairlift.bench import compare_report
    from chairlift.bench.compare import Comparison
    from chairlift.engine.record_file import RecordFile
    from chairlift.traffic import mixes
    from chairlift.traffic.arrivals import Demand
    from chairlift.traffic.workloads import Lengths

    chosen = reports.choose_shape(shape, model, settings)
    reports.check_files(json_file, record_view)
    if output is not None and output.exists() and not output.is_dir():
        raise ChairliftError(f"{output} is a file, not a folder for pictures: name another")
    if output is not None:
        reports.need_matplotlib("--output", "--json FILE writes the numbers without")
    settings["max_sequences"] = max_sequences
    lengths = Lengths.parse(prompt_tokens), Lengths.parse(output_tokens)
    demand = Demand(workload, requests, *lengths, workload_seed, arrivals, rate, burstiness, duration)
    axes = {
        "batching": batching or ["static", "continuous"],
        "prefill": prefill or ["chunked"],
        "policy": policy or ["fcfs"],
        "predictor": predictor or [],
        "preemption": preemption or [],
    }
    comparison = Comparison(
        chosen,
        settings,
        axes,
        mixes.make(
            demand,
            deadline=deadline,
            cap=max_tokens,
            lengths_are_known=lengths_are_known,
            rehearse=rehearse,
            only=only,
        ),
        repeat=repeat,
        naive=naive,
    )
    was_interrupted = False
    try:
        with ExitStack() as stack, reports.progress_bar(comparison.tokens) as (notice, advance):
            if record_view is not None:
                file = RecordFile(record_view, f"{workload}, compared: {chosen}")
                comparison.record_file = stack.enter_context(file)
            comparison.run(notice, advance)
    except KeyboardInterrupt:
        if not any(cell.runs for cell in comparison.cells):
            raise
        was_interrupted = True
    summary = compare_report.summarize(comparison)
    reports.show(compare_report.tables(summary))
    reports.write_numbers(json_file, summary, indent=None)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        reports.write_numbers(output / "numbers.json", summary, indent=None)
        from chairlift.bench.plots import draw_all

        drawn = draw_all(summary, output, picture)
        notes.print(f"drew {', '.join(map(str, drawn))}", style="dim", markup=False)
    if was_interrupted:
        raise typer.Exit(130)
