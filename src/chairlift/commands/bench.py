"""`chairlift bench`: speed, alone and beside other engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from chairlift.commands import reports
from chairlift.commands.command import Command, Group
from chairlift.commands.options import with_model, with_settings
from chairlift.commands.screen import notes
from chairlift.core.errors import ChairliftError

if TYPE_CHECKING:
    from chairlift.bench.serve import Progress

app = typer.Typer(help="Measure speed.", cls=Group, no_args_is_help=True)


@app.command(cls=Command)
@with_settings
@with_model("")
def offline(
    shape: Annotated[
        str | None, typer.Option(help="A model's shape with random weights, such as smollm2-135m, in place of --model.")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="uniform256 (default on a GPU), cpu64 (on a CPU), uniform512, groups512, single, prefill8k, uniform, "
            "lognormal, or a JSONL file with a prompt or prompt_tokens, and output_tokens, in each line."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of uniform and lognormal.", min=1)] = 64,
    prompt_tokens: reports.PromptTokens = "16..256",
    output_tokens: reports.OutputTokens = "16..256",
    workload_seed: Annotated[int, typer.Option(help="Another seed draws other lengths and tokens.")] = 0,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="Also run transformers, transformers-static, openvino or openvino-stateful; repeatable."),
    ] = None,
    compare_python: Annotated[
        str | None, typer.Option(help="The Python interpreter that has the other engines, if it is not this one.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Runs of each engine, interleaved; medians are shown.", min=1)] = 1,
    threads: Annotated[int | None, typer.Option(help="CPU threads of each engine (default: all cores).", min=1)] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 takes the likeliest token.", min=0)] = 0.0,
    acceptance: Annotated[
        float | None,
        typer.Option(
            help="With --speculation: accept drafts with this probability, whatever the tokens; for random weights.",
            min=0,
            max=1,
        ),
    ] = None,
    profile_steps: Annotated[
        bool, typer.Option("--profile-steps", help="Also show the host's time per step, by part.")
    ] = False,
    record_steps: Annotated[
        Path | None,
        typer.Option(help="Write every step to this file, for `chairlift bench replay`; this slows the run."),
    ] = None,
    record_view: reports.RecordView = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write every run's numbers to this file.")
    ] = None,
    *,
    model: str,
    settings: dict[str, Any],
) -> None:
    """Measure a workload submitted all at once: throughput, latency, and the share of the machine's limit reached."""
    from chairlift.bench.offline import Benchmark, offline_table, orientation, run_offline, summarize
    from chairlift.costs.steps import steps_table
    from chairlift.execution.build import choose_device
    from chairlift.traffic.workloads import Lengths, make

    chosen = reports.choose_shape(shape, model, settings)
    settings["acceptance"] = acceptance
    reports.check_files(json_file)
    reports.check_files(record_steps, record_view)
    usual = "cpu64" if choose_device(settings["device"]).type == "cpu" else "uniform256"
    lengths = Lengths.parse(prompt_tokens), Lengths.parse(output_tokens)
    benchmark = Benchmark(
        chosen,
        settings,
        make(workload or usual, requests, *lengths, workload_seed),
        compare=compare or [],
        python=compare_python or sys.executable,
        repeat=repeat,
        threads=threads,
        temperature=temperature,
        profile_steps=profile_steps,
        record_steps="" if record_steps is None else str(record_steps.absolute()),
        record_view="" if record_view is None else str(record_view.absolute()),
    )
    made, contenders = run_offline(benchmark, lambda text: notes.print(text, style="dim", markup=False))
    summary = summarize(made, contenders)
    reports.write_numbers(json_file, summary)
    reports.show(offline_table(summary))
    print(*orientation(summary), sep="\n")
    if profile_steps:
        reports.show(steps_table(summary["engines"][0]["info"]["steps"]))


@app.command(cls=Command)
def replay(file: Annotated[Path, typer.Argument(help="A file of `chairlift bench offline --record-steps`.")]) -> None:
    """Run recorded steps again, without the scheduler: compare the tokens, and time the forward passes alone."""
    from chairlift.bench.replay import replay_file, replay_table

    with progress_of_file(file) as advance:
        header, found = replay_file(file, advance)
    reports.show(replay_table(header, found))


@contextmanager
def progress_of_file(file: Path) -> Iterator[Callable[[int], None]]:
    """Show how much of a file has been read."""
    from rich.progress import Progress as Bar

    total = file.stat().st_size if file.exists() else None
    with Bar(console=notes, transient=True) as bar:
        task = bar.add_task("replaying", total=total)
        yield lambda count: bar.advance(task, count)


@app.command(cls=Command)
def scheduler() -> None:
    """Measure the scheduler's own time per step, by the number of waiting requests."""
    from chairlift.costs.scheduler import run, scheduler_table

    reports.show(scheduler_table(run()))


@app.command(cls=Command)
def serve(
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model's name (default: the server's first).")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="API key, sent as a bearer token.", show_default=False)] = None,
    endpoint: Annotated[
        Literal["completions", "chat"],
        typer.Option(help="completions sends prompts as token ids, chat as text of about that length."),
    ] = "completions",
    workload: Annotated[
        str,
        typer.Option(
            help="uniform, lognormal, groups, chats, a mix such as chats*3+uniform (docs/simulation.md), uniform256, "
            "uniform512, single, prefill8k, cpu64, or a JSONL file."
        ),
    ] = "uniform",
    requests: Annotated[
        int | None, typer.Option(help="Largest number of requests (default: all; 64 of uniform and lognormal).", min=1)
    ] = None,
    prompt_tokens: reports.PromptTokens = "16..256",
    output_tokens: reports.OutputTokens = "16..256",
    workload_seed: reports.TrafficSeed = 0,
    vocab_size: Annotated[
        int | None, typer.Option(help="Keep token ids below this, for a model with a small vocabulary.", min=1)
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second; inf is all at once (default: inf, or a recording's own rate)."),
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="poisson, constant, burst, diurnal, or a recording (of chairlift serve --record, or JSONL or CSV "
            "with timestamp in seconds, prompt_tokens and output_tokens, or as Mooncake, Azure or BurstGPT name them), "
            "which gives the lengths too."
        ),
    ] = "poisson",
    burstiness: reports.Burstiness = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds to send for; later requests are not sent.", min=0)
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(help="Most requests in flight; the wait of held requests counts in their latency.", min=1),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 takes the likeliest token.", min=0)] = 0.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Count answers within ttft:MS, tpot:MS or e2e:MS; repeatable, all must hold."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds until an unfinished answer counts as failed.", min=0.001)
    ] = 600.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers, with each request's times, to this file.")
    ] = None,
) -> None:
    """Measure any OpenAI-compatible server under open-loop load: each request is sent at its planned time.

    Every latency is measured from the planned send time.
    """
    import asyncio

    from chairlift.bench import serve, serve_report
    from chairlift.engine.garbage import freeze_loaded, no_full_collections
    from chairlift.traffic.arrivals import Demand
    from chairlift.traffic.workloads import Lengths

    targets = serve_report.read_targets(goodput or [])
    reports.check_files(json_file)
    lengths = Lengths.parse(prompt_tokens), Lengths.parse(output_tokens)
    demand = Demand(
        workload, requests, *lengths, workload_seed, arrivals, rate, burstiness, duration, vocab_size=vocab_size
    )
    plan = serve.LoadPlan(
        url,
        demand.queries(),
        model,
        api_key,
        endpoint,
        temperature,
        max_concurrency,
        timeout,
        vocab_size=vocab_size,
        seed=workload_seed,
    )
    if not plan.queries:
        raise ChairliftError(f"no request is sent within {duration:g} s: give a longer --duration")
    load_test = serve.LoadTest(plan)
    was_interrupted = False
    try:
        freeze_loaded()  # a collection would add a pause to every answer under measurement
        with progress_bar(len(plan.queries)) as tell, no_full_collections():
            asyncio.run(load_test.run(tell))
    except KeyboardInterrupt:
        if not load_test.records:
            raise
        was_interrupted = True
    summary = serve_report.summarize(load_test.result(), targets)
    reports.write_numbers(json_file, summary, indent=None)
    reports.show(serve_report.tables(summary))
    if was_interrupted:
        raise typer.Exit(130)
    if not summary["requests"]["ok"]:
        raise ChairliftError("no request succeeded: the reasons are above")


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[Progress], None]]:
    """Show finished requests and speed on stderr, if it is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    with Bar(*columns, console=notes, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total, speed="")

        def tell(found: Progress) -> None:
            bar.update(task, completed=found.done, speed=f"{found.tokens / max(found.seconds, 1e-9):,.0f} tok/s")

        yield tell
