"""A simulation's report as one HTML file: tables and plots, without scripts, libraries or a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from chairlift.report.svg import Points, chart
from chairlift.simulation.run import TARGETS, Outlook

_STYLE = (
    "body{font:14px sans-serif;color:#333;max-width:760px;margin:2em auto;padding:0 1em}"
    "h1{font-size:18px}table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:3px 12px;border-bottom:1px solid #e3e3e3;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{width:100%;margin:.6em 0}p{color:#8a8a8a}"
)
_MOST_LINES = 8  # replicas of a plot
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end", "step": "step"}


def report(summary: dict[str, Any], outlook: Outlook) -> str:
    """Return the page."""
    head = f"{summary['model']} on {summary['devices']} x {summary['hardware']}, simulated: {summary['trace']}"
    done = summary["requests"]
    totals = [
        ("requests", f"{done['finished']:,} finished, {done['rejected']:,} rejected"),
        ("simulated time, s", f"{summary['seconds']:,.1f}"),
        ("requests/s", f"{summary['requests_s']:,.2f}"),
        ("output tok/s", f"{summary['output_tok_s']:,.1f}"),
        ("prompt and output tok/s", f"{summary['total_tok_s']:,.1f}"),
        ("prompt tokens found in the prefix cache", f"{summary['cached_tokens']:,} of {summary['prompt_tokens']:,}"),
        ("peak concurrency", f"{summary['peak_concurrency']:,}"),
        ("preemptions", f"{summary['preemptions']:,}"),
        ("devices busy", f"{summary['busy']:.1%}"),
    ]
    if summary["targets_ms"]:
        totals.append(("requests within all targets", f"{summary['good']:.2%}"))
    totals += [(f"{each['requests']:,} rejected, for example", each["example"]) for each in summary["rejections"]]
    latencies: list[tuple[str, ...]] = [("ms", "mean", "p50", "p90", "p99", "max")]
    latencies += [(_NAMES[name], *(f"{each:,.1f}" for each in own.values())) for name, own in summary["ms"].items()]
    settings = json.dumps(summary.get("settings", {}), indent=1)
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(head)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_STYLE}</style></head><body><h1>{escape(head)}</h1>",
            "<p>Step times are predicted by a cost model, not measured.</p>",
            _table(totals),
            _table(latencies),
            *_plots(summary, outlook),
            f"<details><summary>settings</summary><pre>{escape(settings)}</pre></details>",
            "</body></html>",
            "",
        ]
    )


def _plots(summary: dict[str, Any], outlook: Outlook) -> list[str]:
    """Return the plots: latencies, then the batch, the cache and the tokens of all replicas over time."""
    targets = summary["targets_ms"]
    shares = {
        _NAMES[name]: [(share, 1000 * value) for share, value in outlook.times[name].curve()]
        for name in TARGETS
        if outlook.times[name].count
    }
    limits = {f"{_NAMES[name]} target": limit for name, limit in targets.items()}
    rows = [series.rows() for series in outlook.series]
    waiting = _over_time(rows, "waiting")
    waits = any(count for line in waiting.values() for _, count in line)
    return [
        chart("Latency by share of requests", "ms", shares, x_label="% of requests", is_log=True, limits=limits),
        chart("Batch: sequences that run", "sequences", _over_time(rows, "running")),
        *([chart("Requests that wait", "sequences", waiting)] if waits else []),
        chart("KV cache in use", "%", _over_time(rows, "kv", 100)),
        chart("Prompt tokens of a step", "tokens", _over_time(rows, "prompt_tokens")),
        chart("Sampled tokens of a step", "tokens", _over_time(rows, "decodes")),
    ]


def _over_time(replicas: Sequence[Sequence[dict[str, float]]], name: str, scale: float = 1.0) -> dict[str, Points]:
    """Return a line for each of the first replicas."""
    return {
        f"replica {number}" if len(replicas) > 1 else name: [(row["at"], scale * row[name]) for row in rows]
        for number, rows in enumerate(replicas[:_MOST_LINES])
    }


def _table(rows: Sequence[Sequence[str]]) -> str:
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"
