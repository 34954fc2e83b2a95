"""`chairlift bench kv`: accuracy, memory and speed of an 8-bit KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.commands.options import DEFAULT_MODEL, Model, with_settings
from chairlift.commands.reports import show
from chairlift.commands.screen import notes
from chairlift.core.errors import ChairliftError


@with_settings
def kv(
    text: Annotated[
        Path, typer.Argument(metavar="TEXT", help="A text file of some thousand words, for perplexity and prompts.")
    ],
    model: Model = DEFAULT_MODEL,
    repeat: Annotated[int, typer.Option(help="Decode runs per dtype; medians are shown.", min=1)] = 5,
    *,
    settings: dict[str, Any],
) -> None:
    """Compare a KV cache in the model's dtype and in 8 bits: perplexity, greedy tokens, memory and decode speed."""
    from chairlift.evaluation.kv_accuracy import kv_table, measure

    try:
        read = text.read_text(errors="replace")
    except OSError as error:
        raise ChairliftError(f"{text} cannot be read: {error.strerror}") from None
    with notes.status("loading") as status:
        found = measure(model, read, settings, repeat, status.update)
    show(kv_table(found, model))
