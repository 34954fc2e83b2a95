"""What was found about the prefix cache: numbers for a file, and tables for a reader."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from chairlift import __version__
from chairlift.bench.cache_cost import CostRow
from chairlift.bench.cache_trace import BLOCK_TOKENS, OURS, SizeRow, Trace, infinite
from chairlift.core.words import counted

Summary = dict[str, Any]


def summarize(costs: Sequence[CostRow], trace: Trace | None, rows: Sequence[SizeRow]) -> Summary:
    """All numbers; hits are blocks."""
    found: Summary = {
        "chairlift": __version__,
        "machine": {"processor": platform.machine(), "system": platform.system(), "python": platform.python_version()},
        "costs": [asdict(row) for row in costs],
    }
    if trace is not None:
        found["trace"] = {
            "name": trace.name,
            "requests": len(trace.paths),
            "blocks": trace.blocks,
            "distinct": trace.distinct,
            "block_tokens": BLOCK_TOKENS,
            "infinite": infinite(trace),
            "sizes": [asdict(row) for row in rows],
        }
    return found


def tables(summary: Summary) -> Group:
    """What it costs and, where a trace was given, what is found in caches of several sizes."""
    return Group(cost_table(summary["costs"]), *((trace_table(summary["trace"]),) if "trace" in summary else ()))


def cost_table(costs: Sequence[Summary]) -> Table:
    """A row for each number of cached blocks."""
    shown = Table(title=Text("the prefix cache, microseconds"), title_justify="left")
    for column in ("cached\nblocks", "find 8,000\ntokens", "hold\nthem", "insert\na block", "evict\na block"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in costs:
        times = (
            f"{row['match_us']:,.0f}",
            f"{row['lock_us']:,.0f}",
            f"{row['insert_us']:.2f}",
            f"{row['evict_us']:.2f}",
        )
        shown.add_row(f"{row['cached']:,}", *times)
    return shown


def trace_table(trace: Summary) -> Table:
    """A row for each rule of eviction, a column for each size: the share of blocks found, and of the gap closed."""
    most = trace["infinite"]
    shown = Table(
        title=Text(
            f"{trace['name']}: {counted(trace['requests'], 'request')}, {counted(trace['blocks'], 'block')} of "
            f"{counted(trace['block_tokens'], 'token')}, {trace['distinct']:,} of them distinct"
        ),
        title_justify="left",
        caption=Text(
            "blocks found, of all that were asked for; of what the optimum finds; of the gap from LRU to it, closed\n"
            f"a cache without a limit finds {most / max(1, trace['blocks']):.1%}; requests come one after the other"
        ),
        caption_justify="left",
    )
    shown.add_column("cache")
    for row in trace["sizes"]:
        share = row["size"] / trace["distinct"]
        label = f"{counted(row['size'], 'block')}\n{_count(row['size'] * trace['block_tokens'])} tokens, {share:.0%}"
        shown.add_column(label, justify="right", no_wrap=True)
    for name in trace["sizes"][0]["hits"]:
        shown.add_row(name, *(_cell(row, name, trace["blocks"]) for row in trace["sizes"]))
    best = [
        f"{row['optimum'] / trace['blocks']:.1%}, {row['optimum'] / max(1, most):.0%} of no limit"
        for row in trace["sizes"]
    ]
    shown.add_section()
    shown.add_row("optimum", *best)
    return shown


def _cell(row: Summary, name: str, blocks: int) -> str:
    hits, best, ours = row["hits"][name], row["optimum"], row["hits"][OURS]
    text = f"{hits / blocks:.1%}  {hits / max(1, best):4.0%}"
    return text if name == OURS else f"{text}  {(hits - ours) / max(1, best - ours):+5.0%}"


def _count(number: float) -> str:
    """A large number in few letters.

    >>> _count(935936), _count(4679680)
    ('936k', '4.7M')
    """
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"
