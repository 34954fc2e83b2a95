"""`chairlift bench sizes`: decode speed at several batch sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from chairlift.commands.options import DEFAULT_MODEL
from chairlift.commands.reports import JsonFile, check_files, check_picture, progress_bar, show, write_numbers
from chairlift.core.errors import ChairliftError

_FEW, _MANY = "1,2,4,8,16,32,64", "1,2,4,8,16,32,64,128,256"


def sizes(
    shape: Annotated[
        str,
        typer.Option(help="A model's shape: stories15m, qwen3-0.6b, ..., or a folder with a config.json."),
    ] = DEFAULT_MODEL,
    sizes: Annotated[
        str | None, typer.Option(help=f"Batch sizes (default: {_FEW} on a CPU, up to 256 on a GPU).")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 512,
    output: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 128,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="auto is float32 on a CPU.")
    ] = "auto",
    kv_dtype: Annotated[Literal["auto", "int8", "fp8"], typer.Option(help="Dtype of the KV cache.")] = "auto",
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speed by batch size to this .svg or .png file.")] = None,
    from_json: Annotated[
        Path | None, typer.Option(help="Measure nothing: show and draw the numbers of an earlier --json.")
    ] = None,
) -> None:
    """Measure decode speed at several batch sizes, and its share of the limit that memory bandwidth sets.

    The weights are random; nothing is downloaded.
    """
    from chairlift.bench.sizes import measure, read_sizes, sizes_table, title

    check_picture(plot)
    check_files(plot, json_file)
    if from_json is not None:
        summary = read(from_json)
    else:
        from chairlift.execution.build import choose_device

        chosen = read_sizes(sizes or (_FEW if choose_device(device).type == "cpu" else _MANY))
        settings = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype}
        with progress_bar(sum(chosen) * output) as (notice, advance):
            summary = measure(shape, chosen, prompt, output, settings, notice, advance)
    show(sizes_table(summary))
    write_numbers(json_file, summary)
    if plot is not None:
        from chairlift.bench.plots import batch_sizes
        from chairlift.report.drawing import draw

        draw(plot, batch_sizes, summary, title(summary))


def read(file: Path) -> dict[str, Any]:
    """Read the numbers of an earlier run."""
    from chairlift.bench.sizes import sizes_table

    try:
        found: dict[str, Any] = json.loads(file.read_text())
        sizes_table(found)
    except OSError as error:
        raise ChairliftError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ChairliftError(f"{file} holds no numbers of bench sizes: write them with --json") from None
    return found
