"""Which scheduling holds latency targets at what multiple of a trace's rate, simulated: a table and a plot.

    python benchmarks/trace_capacity.py trace.csv --share 0.1 --plot docs/images/capacity-conv.svg

Each scheduling is simulated on the first requests of the trace at rates that are bisected until the highest one that
holds is known within 3%. The plot has the 99th percentiles of a few schedulings at common rates.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from chairlift.costs.shape import shape_of
from chairlift.report.svg import chart, stacked
from chairlift.simulation.planning import Candidate, Verdict
from chairlift.simulation.workers import Workers, started
from chairlift.traffic.traces import read_trace

TARGETS = {"ttft": 1.0, "tpot": 0.05}
ONE = Candidate("h200", 1, 16, "auto")
SCHEDULINGS: tuple[dict[str, Any], ...] = (
    {},
    {"policy": "sjf"},
    {"policy": "longest-prefix"},
    {"prefill": "splitfuse"},
    {"prefill": "prefill-first"},
    {"step_tokens": 2048},
    {"step_tokens": 1024},
    {"step_tokens": 512},
    {"target_tpot": 0.04},
    {"policy": "sjf", "target_tpot": 0.04},
)
_PLOTTED = (0, 4, 7, 8)  # schedulings of the plot
_WITHIN = 1.03


def highest(workers: Workers, settings: dict[str, Any]) -> tuple[float, Verdict, str]:
    """Return the highest multiple of the rate that holds, its verdict, and what breaks first above it."""
    each = Candidate(ONE.hardware, ONE.ranks, ONE.bits, ONE.kv_dtype, tuple(settings.items()))
    low, high, held, breaks = 0.0, 4.0, None, ""
    while not low or high / low > _WITHIN:
        scale = _between(low, high) if breaks else high
        verdict = workers.check(True, each, scale)
        if verdict.holds:
            low, held = scale, verdict
            high = 2 * scale if not breaks else high
        else:
            high, breaks = scale, verdict.breaks_first
    assert held is not None
    return low, held, breaks


def _between(low: float, high: float) -> float:
    return (low * high) ** 0.5 if low else high / 2


def main() -> None:
    """Print the table, and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="simulate only this share of the trace's requests")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    queries = read_trace(given.trace)
    queries = queries[: int(given.share * len(queries))]
    rate = (len(queries) - 1) / queries[-1].at
    shapes = {(16, "auto"): shape_of(given.model)}
    found: dict[str, Any] = {"requests": len(queries), "requests_s": rate, "rows": [], "curves": {}}
    with (
        TemporaryDirectory() as folder,
        started(given.processes, Path(folder), queries, shapes, TARGETS) as workers,
        ThreadPoolExecutor(given.processes) as threads,
    ):
        print(f"{len(queries):,} requests, {rate:.2f} a second\n")
        print("| scheduling | multiple of the rate | requests/s | TTFT p99, ms | TPOT p99, ms | breaks first |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for settings, (scale, held, breaks) in zip(
            SCHEDULINGS, threads.map(partial(highest, workers), SCHEDULINGS), strict=True
        ):
            ms = {name: held.summary["ms"][name]["p99"] for name in TARGETS}
            row = (name_of(settings), f"{scale:.1f}", f"{scale * rate:.1f}", f"{ms['ttft']:,.0f}", f"{ms['tpot']:.1f}")
            print(f"| {' | '.join(row)} | {breaks.upper()} |", flush=True)
            found["rows"].append({"settings": settings, "scale": scale, "ms": ms, "breaks": breaks})
        if given.plot is not None:
            found["curves"] = curves(workers, threads, max(row["scale"] for row in found["rows"]))
            given.plot.write_text(picture(found["curves"], rate))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


def name_of(settings: dict[str, Any]) -> str:
    """Return the flags of a scheduling."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items()) or "default"


def curves(workers: Workers, threads: ThreadPoolExecutor, most: float) -> dict[str, list[tuple[float, float, float]]]:
    """Return the multiple of the rate and both percentiles, for some schedulings."""
    scales = [most * share for share in (0.2, 0.4, 0.6, 0.75, 0.85, 0.95, 1.05, 1.15)]

    def at(number: int) -> list[tuple[float, float, float]]:
        each = Candidate(ONE.hardware, ONE.ranks, ONE.bits, ONE.kv_dtype, tuple(SCHEDULINGS[number].items()))
        points = []
        for scale in scales:
            ms = workers.at_rate(scale, each, is_whole=True).summary["ms"]
            points.append((scale, ms["ttft"]["p99"], ms["tpot"]["p99"]))
        return points

    return {
        name_of(SCHEDULINGS[number]): line for number, line in zip(_PLOTTED, threads.map(at, _PLOTTED), strict=True)
    }


def picture(lines: dict[str, Sequence[tuple[float, float, float]]], rate: float) -> str:
    """Draw both percentiles by requests a second."""
    return stacked(
        [
            chart(
                f"{name.upper()} at the 99th percentile, Llama-3.1-8B on one H200, simulated",
                "ms",
                {label: [(rate * point[0], point[place]) for point in points] for label, points in lines.items()},
                x_label="requests a second",
                is_log=True,
                is_marked=True,
                limits={f"target: {1000 * limit:g} ms": 1000 * limit},
            )
            for place, (name, limit) in enumerate(TARGETS.items(), 1)
        ]
    )


if __name__ == "__main__":
    main()
