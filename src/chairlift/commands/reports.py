"""Parts that the measuring commands share: flags, a progress bar, tables, JSON files and checks of pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.commands.options import DEFAULT_MODEL
from chairlift.commands.screen import notes
from chairlift.core.errors import ChairliftError

JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write all numbers to this file.")]
RecordView = Annotated[
    Path | None,
    typer.Option(help="Write what the scheduler did, step by step, to this file, for `chairlift view`."),
]
PromptTokens = Annotated[
    str,
    typer.Option(
        help="Prompt lengths of drawn requests: LOW..HIGH, one length, MEAN:LOW..HIGH, or MEAN:p99=LENGTH (lognormal)."
    ),
]
OutputTokens = Annotated[str, typer.Option(help="Answer lengths, in the same format.")]
TrafficSeed = Annotated[int, typer.Option(help="Another seed draws other lengths, tokens and arrival times.")]
Burstiness = Annotated[
    float | None,
    typer.Option(help="Shape of burst's gamma-distributed gaps: 1 is Poisson, less is burstier (default: 0.25)."),
]
_KINDS = (".svg", ".png")


def choose_shape(shape: str | None, model: str, settings: dict[str, Any], flag: str = "--model") -> str:
    """Return the model to load: MODEL, or the shape, which gets random weights."""
    if shape and model:
        raise ChairliftError(f"--shape and {flag} exclude each other: give one")
    if shape:
        settings["load_format"] = "dummy"
    return shape or model or DEFAULT_MODEL


def check_files(*files: Path | None) -> None:
    """Raise for files that cannot be written, before anything is measured."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise ChairliftError(f"{file} cannot be written: there is no such folder")
        if file is not None and file.is_dir():
            raise ChairliftError(f"{file} cannot be written: it is a folder; name a file")


def check_picture(file: Path | None) -> None:
    """Raise for a file that is not a picture, or if matplotlib is missing."""
    if file is None:
        return
    if file.suffix not in _KINDS:
        raise ChairliftError(f"{file} is not a picture: use a name that ends in {' or '.join(_KINDS)}")
    need_matplotlib("--plot", "leave it out for the numbers alone")


def need_matplotlib(flag: str, without: str) -> None:
    """Raise if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ChairliftError(
            f"{flag} draws with matplotlib, which is not installed: pip install 'chairlift[plots]'; {without}"
        )


def write_numbers(file: Path | None, summary: dict[str, Any], indent: int | None = 2) -> None:
    """Write all numbers as JSON, if a file was given."""
    if file is not None:
        write_text(file, json.dumps(summary, indent=indent) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a text file."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ChairliftError(f"{file} cannot be written: {error.strerror or error}; name another file") from None


def show(table: Any) -> None:
    """Print a table, 160 columns wide if stdout is not a terminal."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(table)


@contextmanager
def progress_bar(total: int | None) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """Show the current run and the progress of all runs on stderr; without a terminal, only each run's name."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    is_terminal = sys.stderr.isatty()
    with Progress(*columns, console=notes, transient=True, disable=not is_terminal) as bar:
        task = bar.add_task("", total=total)

        def notice(text: str) -> None:
            bar.update(task, description=text)
            if not is_terminal:
                notes.print(text, style="dim", markup=False)

        yield notice, lambda count: bar.advance(task, count)
