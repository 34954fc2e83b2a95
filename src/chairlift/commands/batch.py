"""`chairlift batch`: run a file of requests and write a file of answers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.commands.options import DEFAULT_MODEL, Model, with_settings
from chairlift.commands.screen import begin_loading, notes
from chairlift.core.words import counted

if TYPE_CHECKING:
    from chairlift.offline.batch_output import Tally


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
    begin_loading(model, settings, is_told=watched)
    from chairlift.offline.llm import LLM

    llm = LLM(model, progress=watched, **settings)
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
        tally = run_batch(
            llm,
            source,
            target,
            lambda tally: bar.update(task, completed=tally.lines, speed=speed(tally)),
            served_model_name=served_model_name,
        )
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
