"""`chairlift batch`: a file of requests to a file of answers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.commands.options import DEFAULT_MODEL, Model, with_settings
from chairlift.commands.screen import notes


@with_settings
def batch(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Requests, as OpenAI's batch lines.", exists=True, dir_okay=False)
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Answers; those already there are kept and skipped.")],
    model: Model = DEFAULT_MODEL,
    *,
    settings: dict[str, Any],
) -> None:
    """Answer a file of requests; run it again to go on after an interruption."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from chairlift.batch import Tally, count_lines, run_batch
    from chairlift.llm import LLM

    watched = sys.stderr.isatty()
    total = count_lines(source)
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
            llm, source, target, lambda tally: bar.update(task, completed=tally.lines, speed=speed(tally))
        )
    notes.print(
        f"{tally.done:,} done, {tally.failed:,} failed, {tally.skipped:,} skipped; "
        f"{tally.tokens:,} tokens at {speed(tally)}"
    )
