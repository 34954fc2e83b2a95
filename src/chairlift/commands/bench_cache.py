"""`chairlift bench cache`: the prefix cache's own cost, and its hit rate on a recorded trace."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.commands.reports import JsonFile, check_files, check_picture, progress_bar, show, write_numbers
from chairlift.core.errors import ChairliftError


def cache(
    trace: Annotated[
        Path | None, typer.Option(help="Recorded requests in Mooncake's format: JSONL with timestamp and hash_ids.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the hit rate by cache size to this .svg or .png file.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure the time of prefix cache operations by its size and, with --trace, its hit rate on recorded requests.

    Eviction is compared with other rules, and with the optimal one, which knows all later requests.
    """
    from chairlift import __version__
    from chairlift.costs import prefix_cache as costs
    from chairlift.report.numbers import machine
    from chairlift.simulation import cache as study

    if plot is not None and trace is None:
        raise ChairliftError("--plot draws the hit rate on a trace: add --trace FILE")
    check_picture(plot)
    check_files(plot, json_file)
    recorded = study.read_paths(trace) if trace is not None else None
    sizes = study.sizes_of(recorded) if recorded is not None else []
    total = study.work(recorded, sizes) if recorded is not None else 0
    with progress_bar(total) as (notice, advance):
        rows = [asdict(row) for row in costs.run(notice=notice)]
        summary: dict[str, Any] = {"chairlift": __version__, "machine": machine(), "costs": rows}
        if recorded is not None:
            summary["trace"] = study.summarize(recorded, study.run(recorded, sizes, notice, advance))
    show(costs.cost_table(rows))
    if recorded is not None:
        show(study.trace_table(summary["trace"]))
    write_numbers(json_file, summary)
    if plot is not None:
        from chairlift.bench.plots import cache_hits
        from chairlift.report.drawing import draw

        draw(plot, cache_hits, summary["trace"])
