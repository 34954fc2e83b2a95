"""The results of a load test: numbers for a file, and tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from rich.console import Group

from chairlift import __version__
from chairlift.bench.serve import LoadResult, Record
from chairlift.core.errors import ChairliftError
from chairlift.core.words import counted
from chairlift.report.numbers import spread
from chairlift.report.tables import table

Targets = Mapping[str, float]  # latency limits of a good answer, in milliseconds
TARGETS = ("ttft", "tpot", "e2e")
STATES = ("ok", "failed", "refused", "unfinished")
LABELS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "gap": "longest gap of each answer",
    "e2e": "end to end",
    "late": "sent late",
}
SHOWN_ERRORS = 5


def read_targets(texts: Iterable[str]) -> dict[str, float]:
    """Parse targets of the command line.

    >>> read_targets(["ttft:500", "tpot:50"])
    {'ttft': 500.0, 'tpot': 50.0}
    """
    found = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            found[name] = -1.0
        if name not in TARGETS or not found[name] > 0:
            raise ChairliftError(f"{text!r} is not a goodput target: use ttft, tpot or e2e with milliseconds: ttft:500")
    return found


def times(record: Record) -> dict[str, float]:
    """Return an answer's latencies in milliseconds, from the planned send time."""
    found = {}
    if record.end is not None:
        found["e2e"] = 1000 * (record.end - record.planned)
    if record.sent is not None:
        found["late"] = 1000 * (record.sent - record.planned)
    if record.chunks:
        found["ttft"] = 1000 * (record.chunks[0] - record.planned)
        if record.output_tokens > 1 and "e2e" in found:
            found["tpot"] = (found["e2e"] - found["ttft"]) / (record.output_tokens - 1)
        if len(record.chunks) > 1:
            found["gap"] = 1000 * max(after - before for before, after in pairwise(record.chunks))
    return found


def is_good(record: Record, targets: Targets) -> bool:
    """Whether a request succeeded within every target; an answer of one token meets any TPOT."""
    if record.state != "ok":
        return False
    found = times(record)
    if record.output_tokens == 1:
        found["tpot"] = 0.0
    return all(name in found and found[name] <= limit for name, limit in targets.items())


def summarize(result: LoadResult, targets: Targets | None = None) -> dict[str, Any]:
    """Return all numbers: totals, speeds, latency percentiles, and every request."""
    records, seconds = result.records, result.seconds
    ok = [record for record in records if record.state == "ok"]
    states = Counter(record.state for record in records)
    finished = [record for record in records if record.state != "unfinished"]
    output, prompt = sum(record.output_tokens for record in ok), sum(record.prompt_tokens for record in ok)
    rows = [times(record) for record in ok]
    found = {name: [row[name] for row in rows if name in row] for name in LABELS if name != "itl"}
    found["itl"] = [1000 * (b - a) for record in ok for a, b in pairwise(record.chunks)]

    def per_second(count: float) -> float:
        return count / seconds if seconds else 0.0

    summary: dict[str, Any] = {
        "chairlift": __version__,
        "url": result.url,
        "model": result.model,
        "endpoint": result.endpoint,
        "max_concurrency": result.max_concurrency,
        "planned": result.planned,
        "requests": {state: states[state] for state in STATES},
        "status": dict(Counter(str(record.status or "no reply") for record in finished).most_common()),
        "errors": dict(Counter(record.error for record in records if record.error).most_common()),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "asked_output_tokens": sum(record.requested_tokens for record in ok),
        "uncounted": sum(not record.is_counted for record in ok),
        "requests_s": per_second(len(ok)),
        "output_tok_s": per_second(output),
        "total_tok_s": per_second(prompt + output),
        "peak_concurrency": result.peak_concurrency,
        "ms": {name: {**spread(found[name], 50, 90, 99), "max": max(found[name])} for name in LABELS if found[name]},
    }
    if targets:
        good = sum(is_good(record, targets) for record in records)
        share = good / len(finished) if finished else 0.0
        summary["goodput"] = {"targets_ms": dict(targets), "requests_s": per_second(good), "share": share}
    return {**summary, "records": [_row(record) for record in records]}


def tables(summary: dict[str, Any]) -> Group:
    """Return the tables of totals and of latencies."""
    counts = ", ".join(f"{count:,} {state}" for state, count in summary["requests"].items() if count)
    statuses = ", ".join(f"{name}: {count:,}" for name, count in summary["status"].items())
    received, requested = summary["output_tokens"], summary["asked_output_tokens"]
    rows = [
        (f"requests, of {summary['planned']:,} planned", counts or "none"),
        ("by HTTP status", statuses or "none"),
        ("duration, s", f"{summary['seconds']:,.2f}"),
        ("requests/s", f"{summary['requests_s']:,.2f}"),
        ("output tok/s", f"{summary['output_tok_s']:,.1f}"),
        ("prompt and output tok/s", f"{summary['total_tok_s']:,.1f}"),
        ("prompt tokens", f"{summary['prompt_tokens']:,}"),
        ("output tokens", f"{received:,}" if received == requested else f"{received:,} of {requested:,} requested"),
        ("peak concurrency", f"{summary['peak_concurrency']:,}"),
    ]
    if goodput := summary.get("goodput"):
        targets = ", ".join(f"{LABELS[name]} {limit:g} ms" for name, limit in goodput["targets_ms"].items())
        rows.append((f"goodput, requests/s ({targets})", f"{goodput['requests_s']:,.2f} ({goodput['share']:.1%})"))
    times = [(LABELS[name], *(f"{value:,.1f}" for value in found.values())) for name, found in summary["ms"].items()]
    head = f"{summary['model']} at {summary['url']}, {summary['endpoint']}"
    return Group(
        table(head, ("", ""), rows, is_centered=True, has_header=False),
        table("", ("ms", "mean", "p50", "p90", "p99", "max"), times, "\n".join(_notes(summary))),
    )


def _notes(summary: dict[str, Any]) -> list[str]:
    """Return the notes under the tables."""
    errors = list(summary["errors"].items())
    notes = ["latencies are of successful requests, from their planned send time; ITL is between chunks"]
    if summary["uncounted"]:
        notes.append(f"{counted(summary['uncounted'], 'answer')} had no usage: each chunk counts as one token")
    notes += [f"{count:,} x {reason}" for reason, count in errors[:SHOWN_ERRORS]]
    if len(errors) > SHOWN_ERRORS:
        notes.append(f"and {counted(len(errors) - SHOWN_ERRORS, 'other reason')}; --json has them all")
    return notes


def _row(record: Record) -> dict[str, Any]:
    """Return one request for a file; times are seconds from the start of the run."""

    def moment(at: float | None) -> float | None:
        return None if at is None else round(at, 6)

    return {
        "state": record.state,
        "status": record.status,
        "error": record.error,
        "prompt_tokens": record.prompt_tokens,
        "asked_output_tokens": record.requested_tokens,
        "output_tokens": record.output_tokens,
        "planned": moment(record.planned),
        "sent": moment(record.sent),
        "first": moment(record.chunks[0] if record.chunks else None),
        "end": moment(record.end),
        "chunks": [round(at, 6) for at in record.chunks],
    }
