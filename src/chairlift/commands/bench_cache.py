"""`chairlift bench cache`: what the prefix cache costs, and how much of a recorded trace it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from chairlift.commands.bench import show
from chairlift.commands.compare import progress_bar
from chairlift.commands.pictures import check_picture
from chairlift.core.errors import ChairliftError


def cache(
    trace: Annotated[
        Path | None, typer.Option(help="Recorded requests in Mooncake's format: JSONL with timestamp and hash_ids.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw what is found in each size of the cache to this .svg or .png file.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file, too.")] = None,
) -> None:
    """What the prefix cache costs however much is in it and, on recorded requests, how much it finds.

    Eviction is compared with other rules, and with the best one there can be, which knows all that follows.
    """
    from chairlift.bench import cache_cost, cache_report, cache_trace

    if plot is not None and trace is None:
        raise ChairliftError("--plot draws what is found in a trace: add --trace FILE")
    if plot is not None:
        check_picture(plot)
    for file in (plot, json_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise ChairliftError(f"{file} cannot be written: there is no such folder")
    recorded = cache_trace.read_trace(trace) if trace is not None else None
    sizes = cache_trace.sizes_of(recorded) if recorded is not None else []
    total = cache_trace.work(recorded, sizes) if recorded is not None else 0
    with progress_bar(total) as (notice, advance):
        costs = cache_cost.run(notice=notice)
        rows = cache_trace.run(recorded, sizes, notice, advance) if recorded is not None else []
    summary = cache_report.summarize(costs, recorded, rows)
    show(cache_report.tables(summary))
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=2) + "\n")
    if plot is not None:
        from chairlift.bench.cache_plot import draw

        draw(summary["trace"], plot)
