"""`chairlift bench agreement`: how near 16-bit answers are to transformers' own."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from chairlift.commands.bench import show
from chairlift.commands.compare import progress_bar
from chairlift.commands.options import DEFAULT_MODEL, with_model, with_settings
from chairlift.core.errors import ChairliftError


@with_settings
@with_model("")
def agreement(
    shape: Annotated[
        str | None, typer.Option(help="A model's shape with random weights, such as stories15m, in place of MODEL.")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16"],
        typer.Option(help="Of both engines; on a CPU without 16-bit products, give few and short prompts."),
    ] = "bfloat16",
    prompts: Annotated[int, typer.Option(help="How many.", min=1)] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt.", min=1)] = 64,
    tokens: Annotated[int, typer.Option(help="Length of each answer.", min=1)] = 64,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file, too.")] = None,
    *,
    model: str,
    settings: dict[str, Any],
) -> None:
    """Greedy answers in 16 bits beside transformers', on the same weights: tokens, and errors against float32."""
    if shape and model:
        raise ChairliftError("--shape and MODEL exclude each other: give one")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ChairliftError(f"{json_file} cannot be written: there is no such folder")
    from chairlift.bench.agreement import measure, work
    from chairlift.bench.agreement_report import table

    # Where a CPU has no 16-bit products, torch says so at length and takes a slow way that is as exact.
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")
    settings["dtype"] = dtype
    if shape:
        settings["load_format"] = "dummy"
    with progress_bar(work(prompts, tokens)) as (notice, advance):
        summary = measure(
            shape or model or DEFAULT_MODEL, settings, prompts, prompt_tokens, tokens, notice=notice, advance=advance
        )
    show(table(summary))
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=2) + "\n")
