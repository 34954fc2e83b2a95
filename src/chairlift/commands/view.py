"""`chairlift view`: the live page with a recorded run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from chairlift.commands.screen import notes


def view(
    file: Annotated[
        Path, typer.Argument(help="A file of --record-view, which simulate, compare and bench offline take.")
    ],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free port.", min=0, max=65535)] = 8001,
) -> None:
    """Show a recorded run in the browser: the batch step by step, the KV cache, the queue and the latencies."""
    from chairlift.serving.view import run

    sys.exit(run(file, "127.0.0.1", port, lambda text: notes.print(text, markup=False, highlight=False)))
