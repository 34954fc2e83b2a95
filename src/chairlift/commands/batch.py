"""`chairlift batch`: run a file of requests and write a file of answers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from chairlift.commands.options import DEFAULT_MODEL, Model, with_settings
from chairlift.commands.screen import begin_loading, notes
from chairlift.core.settings import Settings
from chairlift.core.words import counted

if TYPE_CHECKING:
    from chairlift.offline.batch_output import Report, Tally

_LONG = 7 * 86_400.0  # seconds: a line of a file waits as long as it takes


@with_settings
def batch(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Requests, as OpenAI's batch lines.", exists=True, dir_okay=False)
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="Answers; finished answers are kept, failed requests run again.")
    ],
    model: Model = DEFAULT_MODEL,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The model's name in IN (default: its own); set it for files made for another server."),
    ] = None,
    on: Annotated[
        Literal["ray"] | None,
        typer.Option(
            help="Answer on replicas on the Ray cluster that `ray status` shows, or one started here "
            "(docs/cluster.md); needs pip install 'chairlift[ray]'. Use it for files that take one machine too long."
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="With --on ray, how many replicas (default: all that the cluster has room for). Lower it to leave "
            "room for others.",
            min=1,
            max=64,
            metavar="N",
        ),
    ] = None,
    replica_cpus: Annotated[
        float,
        typer.Option(help="CPU cores of a replica on a Ray cluster without GPUs. Raise it for large models.", min=0.1),
    ] = 1.0,
    *,
    settings: dict[str, Any],
) -> None:
    """Run a file of requests; run it again to continue after an interruption or to retry failed requests.

    The exit status is 1 when a request failed; OUT then has an error line for it.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from chairlift.offline.batch import check_files, count_lines, run_batch

    watched = sys.stderr.isatty()
    check_files(source, target)
    total = count_lines(source)
    if on is None:
        begin_loading(model, settings, is_told=watched)
        from chairlift.offline.llm import LLM

        llm = LLM(model, progress=watched, **settings)

        def answer(report: Report) -> Tally:
            return run_batch(llm, source, target, report, served_model_name=served_model_name)

    else:
        from chairlift.cluster.ray.connect import check_installed

        check_installed()
        Settings.of(**settings)  # rejects a wrong value before a process is started

        def answer(report: Report) -> Tally:
            from chairlift.cluster.ray.batch import run
            from chairlift.cluster.ray.serve import RayPlan
            from chairlift.models.sources import names_of
            from chairlift.serving.plan import ModelPlan, Plan

            where = str(Path(model).absolute()) if Path(model).exists() else model  # nodes have other working folders
            plan = Plan(
                [ModelPlan(served_model_name or model, where)],
                {name: value for name, value in settings.items() if value is not None},
                max_wait=_LONG,
                ui=False,
                log_level="warning",
            )
            names = names_of(model) if served_model_name is None else frozenset({served_model_name})
            return run(plan, RayPlan(replicas or 0, replicas or 0, replica_cpus), source, target, names, report)

    start = time.monotonic()

    def speed(tally: Tally) -> str:
        return f"{tally.tokens / max(time.monotonic() - start, 1e-9):,.0f} tok/s"

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=notes, transient=True, disable=not watched) as bar:
        task = bar.add_task("requests", total=total, speed="")
        tally = answer(lambda tally: bar.update(task, completed=tally.lines, speed=speed(tally)))
    notes.print(
        f"{tally.done:,} done, {tally.failed:,} failed, {tally.skipped:,} answered before; "
        f"{counted(tally.tokens, 'token')} at {speed(tally)}",
        markup=False,
    )
    if tally.failed:
        for failure in tally.failures:
            notes.print(f"  {failure}", markup=False)
        if more := tally.failed - len(tally.failures):
            notes.print(f"  and {more:,} more: each has an error line in {target}", markup=False)
        notes.print(
            f"correct them in {source} and run the command again: only failed requests are retried", markup=False
        )
        raise typer.Exit(1)
