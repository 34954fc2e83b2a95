"""`chairlift bench speculation`: drafts beside none."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from chairlift.commands import reports
from chairlift.commands.options import with_model, with_settings
from chairlift.commands.screen import notes


@with_settings
@with_model("")
def speculation(
    shape: Annotated[
        str | None, typer.Option(help="A model's shape with random weights, such as llama-3.1-8b, in place of --model.")
    ] = None,
    prompts: Annotated[
        Literal["edits", "free"] | None,
        typer.Option(help="One stream over 20 real prompts: edits and extractions, or free text; else batch sizes."),
    ] = None,
    sizes: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,32",
    fixed: Annotated[
        str, typer.Option(help="Numbers of drafts to measure beside the chosen one, such as 1,3,5.")
    ] = "1,3,5",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt, with batch sizes.", min=1)] = 256,
    output: Annotated[int, typer.Option(help="Tokens of each answer.", min=8)] = 256,
    acceptance: Annotated[
        float | None,
        typer.Option(
            help="Accept drafts with this probability, whatever the tokens; for random weights.", min=0, max=1
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(help="Runs of each way, interleaved; medians are shown.", min=1)] = 3,
    json_file: reports.JsonFile = None,
    *,
    model: str,
    settings: dict[str, Any],
) -> None:
    """Measure the speed of answers with drafts: fixed numbers, and what the engine chooses, beside none."""
    from chairlift.bench import speculation as bench
    from chairlift.bench.sizes import read_sizes

    chosen = reports.choose_shape(shape, model, settings)
    reports.check_files(json_file)
    settings["acceptance"] = acceptance
    if settings["speculation"] == "off":
        settings["speculation"] = "ngram"
    counts = read_sizes(fixed) if fixed else []
    wanted = {name: value for name, value in settings.items() if value is not None}

    def notice(text: str) -> None:
        notes.print(text, style="dim", markup=False)

    if prompts is not None:
        summary = bench.measure_prompts(chosen, prompts, output, counts, wanted, repeat, notice)
    else:
        summary = bench.measure_sizes(chosen, read_sizes(sizes), prompt, output, counts, wanted, repeat, notice)
    reports.show(bench.speculation_table(summary))
    reports.write_numbers(json_file, summary)
