"""Replayed steps: the same forward passes without the scheduler, for timing kernels and for comparing tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from chairlift.cluster.tensor_parallel.build import build
from chairlift.core.settings import Settings
from chairlift.execution.recording import Replay, read_header, replay
from chairlift.report.numbers import percentile
from chairlift.report.tables import table


def replay_file(path: Path, advance: Callable[[int], None] = lambda _bytes: None) -> tuple[dict[str, Any], Replay]:
    """Build the recorded engine again, and replay its steps on the executor alone."""
    header = read_header(path)
    built = build(header["model"], Settings.of(**header["settings"]), progress=False)
    return header, replay(path, built.engine._executor, advance)


def replay_table(header: dict[str, Any], found: Replay) -> Table:
    """Show how many tokens were the same, and the time per step."""
    times = [1000 * each for each in found.step_seconds]
    same = f"{found.equal_tokens:,} of {found.tokens:,}"
    if found.first_difference is not None:
        same += f", the first other one in step {found.first_difference:,}"
    rows: list[tuple[str, ...] | None] = [
        ("steps", f"{found.steps:,}"),
        ("tokens computed", f"{found.slice_tokens:,}"),
        ("tokens sampled as recorded", same),
        ("output tok/s", f"{found.tokens / found.seconds:,.1f}"),
        ("ms a step, median", f"{percentile(times, 50):,.3f}"),
        ("ms a step, p99", f"{percentile(times, 99):,.3f}"),
    ]
    return table(f"replayed steps of {header['model']}", ("", ""), rows)
