"""The results of a comparison: numbers for a file, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from rich.console import Group

from chairlift import __version__
from chairlift.bench.compare import Cell, Comparison
from chairlift.bench.drive import MixResult, RequestRecord
from chairlift.core.words import counted
from chairlift.costs.floor import bound_of
from chairlift.report.numbers import Metrics, machine, medians, spread
from chairlift.report.tables import Columns, number_table
from chairlift.traffic.mixes import Mix
from chairlift.traffic.query import Query

SPEED: Columns = (
    ("passes", "passes", "{:,.0f}"),
    ("occupancy", "batch\nfull", "{:.0%}"),
    ("preemptions", "preemp-\ntions", "{:,.0f}"),
    ("seconds", "time\ns", "{:,.2f}"),
    ("requests_s", "requests\n/s", "{:,.1f}"),
    ("output_tok_s", "output\ntok/s", "{:,.0f}"),
    ("speedup", "vs.\nfirst", "{:.2f}x"),
    ("in_time", "in\ntime", "{:.0%}"),
    ("rank_correlation", "rank\ncorr.", "{:.2f}"),
)
WAITING: Columns = (
    ("ttft_p50", "TTFT\np50", "{:,.0f}"),
    ("ttft_p99", "\np99", "{:,.0f}"),
    ("tpot_p50", "TPOT\np50", "{:,.1f}"),
    ("tpot_p99", "\np99", "{:,.1f}"),
    ("gap_max", "longest\ngap", "{:,.0f}"),
    ("e2e_mean", "whole\nmean", "{:,.0f}"),
    ("e2e_p99", "\np99", "{:,.0f}"),
)
BY_GROUP: Columns = (
    ("requests", "requests", "{:,.0f}"),
    ("ttft_p50", "TTFT\np50", "{:,.0f}"),
    ("ttft_p95", "\np95", "{:,.0f}"),
    ("gap_max", "longest\ngap", "{:,.0f}"),
    ("e2e_mean", "whole\nmean", "{:,.0f}"),
    ("in_time", "in\ntime", "{:.0%}"),
    ("service", "tokens", "{:,.0f}"),
)


def summarize(comparison: Comparison) -> dict[str, Any]:
    """Return all numbers: each cell's medians and runs, with every request and step."""
    mix, limits = comparison.mix, comparison.limits
    cells = [summarize_cell(cell, mix) for cell in comparison.cells]
    first = next((cell["median"]["output_tok_s"] for cell in cells if cell["runs"]), None)
    for cell in cells:
        if cell["runs"]:
            cell["median"]["speedup"] = cell["median"]["output_tok_s"] / first
    return {
        "chairlift": __version__,
        "machine": machine(),
        **comparison.info,
        "seats": limits.max_sequences,
        "step_tokens": limits.step_tokens,
        "workload": {
            "name": mix.name,
            "prompt_tokens": mix.prompt_tokens,
            "output_tokens": mix.output_tokens,
            "lengths_are_known": mix.lengths_are_known,
            "max_tokens": None if mix.lengths_are_known else mix.cap,
            "rehearsed": len(mix.rehearsal),
            "requests": [query_row(query) for query in mix.queries],
        },
        "cells": cells,
        "bounds": list(bounds(cells, mix, limits.max_sequences)),
    }


def summarize_cell(cell: Cell, mix: Mix) -> dict[str, Any]:
    """Return one cell's medians over its runs, for all requests, by tenant and by kind."""
    runs: list[dict[str, Any]] = []
    for run in cell.runs:
        steps = run.steps
        found = measure(run)
        if not cell.choices:
            found["passes"] = bound_of(mix.outputs, run.max_sequences).static  # as transformers does
        runs.append(
            {
                "metrics": found,
                "tenants": by_group(run, lambda answer: answer.query.tenant),
                "kinds": by_group(run, lambda answer: answer.query.kind),
                "requests": [request_row(answer) for answer in run.records],
                "steps": {
                    "at": [round(step.at, 6) for step in steps],
                    "seconds": [round(step.seconds, 6) for step in steps],
                    "sequences": [step.sequences for step in steps],
                    "tokens": [step.tokens for step in steps],
                },
                "service": {
                    tenant: [step.served.get(tenant, 0) for step in steps]
                    for tenant in sorted({tenant for step in steps for tenant in step.served})
                },
            }
        )
    groups = {
        sort: {name: medians([run[sort][name] for run in runs]) for name in (runs[0][sort] if runs else ())}
        for sort in ("tenants", "kinds")
    }
    return {
        "name": cell.name,
        "choices": cell.choices,
        "settings": cell.settings,
        "unavailable": cell.unavailable,
        "median": medians([run["metrics"] for run in runs]),
        **groups,
        "runs": runs,
    }


def measure(run: MixResult) -> Metrics:
    """Return the numbers of one run; without steps, as of transformers, some are missing."""
    answers, steps, seconds = run.records, run.steps, run.seconds
    output = sum(answer.tokens for answer in answers)
    found: Metrics = {
        "seconds": seconds,
        "requests_s": len(answers) / seconds,
        "output_tok_s": output / seconds,
        "total_tok_s": (output + sum(answer.query.prompt_tokens for answer in answers)) / seconds,
        **waits(answers),
    }
    if steps:
        found |= {
            "passes": len(steps),
            "tokens_per_pass": fmean(step.tokens for step in steps),
            "occupancy": fmean(step.sequences for step in steps) / run.max_sequences,
            "gap_max": longest_gap(answers),
            "preemptions": run.preemptions,
        }
    if run.rank_correlation is not None:
        found["rank_correlation"] = run.rank_correlation
    return found


def by_group(run: MixResult, name_of: Callable[[RequestRecord], str]) -> dict[str, Metrics]:
    """Return the numbers of each tenant or kind, if there are several."""
    groups: dict[str, list[RequestRecord]] = {}
    for answer in sorted(run.records, key=name_of):
        groups.setdefault(name_of(answer), []).append(answer)
    if len(groups) < 2:
        return {}
    found = {}
    for name, answers in groups.items():
        found[name] = {
            "requests": len(answers),
            **waits(answers),
            "service": sum(answer.query.prompt_tokens + answer.tokens for answer in answers),
        }
        if run.steps:
            found[name]["gap_max"] = longest_gap(answers)
    return found


def waits(answers: Sequence[RequestRecord]) -> Metrics:
    """Return latencies in milliseconds, and the share of deadlines met."""
    due = [answer.is_in_time for answer in answers if answer.query.deadline is not None]
    times = {
        "ttft": [1000 * answer.ttft for answer in answers],
        "tpot": [1000 * tpot for answer in answers if (tpot := answer.tpot) is not None],
        "e2e": [1000 * answer.seconds for answer in answers],
    }
    found: Metrics = {"in_time": fmean(due)} if due else {}
    for name, values in times.items():
        found |= spread(values, 50, 95, 99, prefix=f"{name}_")
    return found


def longest_gap(answers: Sequence[RequestRecord]) -> float:
    """Return the longest time between two tokens of an answer, in milliseconds."""
    return 1000 * max(answer.gap for answer in answers)


def bounds(cells: Sequence[dict[str, Any]], mix: Mix, max_sequences: int) -> Iterable[dict[str, Any]]:
    """Compare the gain of continuous over static batching, all else equal and with fcfs, with its upper bound."""
    if not mix.is_at_once:
        return
    ours = [cell for cell in cells if cell["runs"] and cell["choices"]]
    for slow in ours:
        for fast in ours:
            wanted = {**slow["choices"], "batching": "continuous"}
            is_pair = slow["choices"].get("batching") == "static" and fast["choices"] == wanted
            if not is_pair or slow["choices"].get("policy", "fcfs") != "fcfs":
                continue
            most = bound_of(mix.outputs, max_sequences)
            reached = slow["median"]["passes"] / fast["median"]["passes"]
            yield {
                "static": slow["name"],
                "continuous": fast["name"],
                "passes": [slow["median"]["passes"], fast["median"]["passes"]],
                "least_passes": [most.static, most.continuous],
                "reached": reached,
                "bound": most.ratio,
                "share": reached / most.ratio,
                "speedup": fast["median"]["output_tok_s"] / slow["median"]["output_tok_s"],
            }


def query_row(query: Query) -> dict[str, Any]:
    """Return one request for a file, with the length of its prompt."""
    names = ("tenant", "kind", "endpoint", "priority", "deadline")
    sizes = {"prompt": query.prompt_tokens, "length": query.output_tokens}
    return {**sizes, "at": query.at, "after": query.after_tokens, **{name: getattr(query, name) for name in names}}


def request_row(answer: RequestRecord) -> dict[str, Any]:
    """Return one request's times for a file, in seconds from the start of the run."""
    return {
        "tokens": answer.tokens,
        "at": round(answer.at, 6),
        "first": round(answer.first, 6),
        "last": round(answer.last, 6),
        "gap": round(answer.gap, 6),
        "expected": answer.expected,
        "stays": [[stay.slot, round(stay.began, 6), round(stay.ended, 6)] for stay in answer.stays],
    }


def middle_run(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the run with the median time, which the pictures show."""
    ordered = sorted(cell["runs"], key=lambda run: run["metrics"]["seconds"])
    found: dict[str, Any] = ordered[len(ordered) // 2]
    return found


def tables(summary: dict[str, Any]) -> Group:
    """Return tables of speeds and latencies by cell, and by tenant or kind."""
    cells = [cell for cell in summary["cells"] if cell["runs"]]
    rows = [((cell["name"],), cell["median"]) for cell in cells]
    parts = [
        number_table(title(summary), SPEED, rows, "\n".join(notes(summary))),
        number_table("latency, ms", WAITING, rows),
    ]
    sort = next((sort for sort in ("tenants", "kinds") if any(cell[sort] for cell in cells)), None)
    if sort is not None:
        groups = [((cell["name"], name), row) for cell in cells for name, row in cell[sort].items()]
        parts.append(number_table(f"by {sort.removesuffix('s')}, ms", BY_GROUP, groups))
    return Group(*parts)


def title(summary: dict[str, Any]) -> str:
    """Return the workload in one line."""
    work = summary["workload"]
    return (
        f"{work['name']}: {counted(len(work['requests']), 'request')}, {work['prompt_tokens']:,} prompt and "
        f"{counted(work['output_tokens'], 'output token')}, batch of up to {summary['seats']:,}"
    )


def notes(summary: dict[str, Any]) -> list[str]:
    """Return the notes under the table: setup, share of the bound reached, unavailable engines."""
    runs = max(len(cell["runs"]) for cell in summary["cells"])
    work = summary["workload"]
    lengths = (
        "max_tokens is each answer's length" if work["lengths_are_known"] else f"max_tokens is {work['max_tokens']:,}"
    )
    found = [f"{summary['device']}, {summary['dtype']}; {lengths}; median of {counted(runs, 'run')}"]
    for bound in summary["bounds"]:
        static, continuous = bound["passes"]
        found.append(
            f"{bound['static']} / {bound['continuous']}: {static:,.0f} / {continuous:,.0f} passes = "
            f"{bound['reached']:.2f}x, {bound['share']:.0%} of the {bound['bound']:.2f}x that these lengths allow"
        )
    absent = [cell for cell in summary["cells"] if cell["unavailable"] is not None]
    return found + [f"{cell['name']} is not available: {cell['unavailable']}" for cell in absent]
