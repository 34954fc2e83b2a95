"""`chairlift bench agreement`: 16-bit answers compared with transformers'."""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal

import typer

from chairlift.commands.options import with_model, with_settings
from chairlift.commands.reports import JsonFile, check_files, choose_shape, progress_bar, show, write_numbers


@with_settings
@with_model("")
def agreement(
    shape: Annotated[
        str | None, typer.Option(help="A model's shape with random weights, such as stories15m, in place of MODEL.")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16"],
        typer.Option(help="Dtype of both engines; on a CPU without 16-bit products, give few and short prompts."),
    ] = "bfloat16",
    prompts: Annotated[int, typer.Option(help="Number of prompts.", min=1)] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt.", min=1)] = 64,
    tokens: Annotated[int, typer.Option(help="Length of each answer.", min=1)] = 64,
    json_file: JsonFile = None,
    *,
    model: str,
    settings: dict[str, Any],
) -> None:
    """Compare greedy 16-bit answers with transformers' on the same weights: tokens, and errors against float32."""
    chosen = choose_shape(shape, model, settings, "MODEL")
    check_files(json_file)
    from chairlift.evaluation.agreement import agreement_table, measure, work

    # On a CPU without 16-bit products torch warns at length and uses a slow path of the same accuracy.
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")
    settings["dtype"] = dtype
    with progress_bar(work(prompts, tokens)) as (notice, advance):
        summary = measure(chosen, settings, prompts, prompt_tokens, tokens, notice=notice, advance=advance)
    show(agreement_table(summary))
    write_numbers(json_file, summary)
