"""`chairlift bench quality`: accuracy, memory and speed of quantized weights and of an 8-bit KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.commands.options import with_model, with_settings
from chairlift.commands.reports import show
from chairlift.commands.screen import notes
from chairlift.core.errors import ChairliftError


@with_settings
@with_model()
def quality(
    text: Annotated[
        Path | None,
        typer.Option(help="A text of some thousand words, for perplexity and prompts (default: a novel's beginning)."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="The unquantized model (default: MODEL in float32). Give it when MODEL is a quantized copy of another."
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(help="Decode runs of each; medians are shown. 0 skips them.", min=0)] = 5,
    *,
    model: str,
    settings: dict[str, Any],
) -> None:
    """Compare a model, also with 8-bit KV, with the unquantized one: perplexity, likeliest tokens, bytes and speed."""
    from chairlift.evaluation.quality import TEXT, measure, quality_table

    text = text or TEXT
    try:
        read = text.read_text(errors="replace")
    except OSError as error:
        raise ChairliftError(f"{text} cannot be read: {error.strerror}") from None
    with notes.status("loading") as status:
        found = measure(model, read, settings, repeat, status.update, reference)
    show(quality_table(found, model))
