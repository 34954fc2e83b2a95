"""The planner: it finds the fewest replicas that hold, says what breaks otherwise, and prints lines that serve."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from chairlift.cli import app
from chairlift.commands.plan import tables
from chairlift.core.errors import ChairliftError
from chairlift.costs.shape import ranks_of, shape_of
from chairlift.simulation.planning import Candidate, Plan, Verdict, busiest, judge, replicas_needed
from chairlift.simulation.workers import started
from chairlift.traffic.query import Query

ONE = Candidate("h200", 1, 16, "auto")


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 13, 64, 100])
def test_the_fewest_replicas_that_hold_are_found(needed: int) -> None:
    tried: list[int] = []

    def check(each: Candidate) -> Verdict:
        tried.append(each.replicas)
        return Verdict(each, {"ttft": needed / each.replicas}, {})

    found = replicas_needed(check, ONE)
    assert found.holds == (needed <= 64)
    assert found.candidate.replicas == min(needed, 64)
    assert len(tried) <= 14


def test_the_busiest_part_is_where_requests_are_dense() -> None:
    queries = [Query(1, 1, at=float(at)) for at in (0, 10, 20, 21, 22, 23, 40, 60)]
    assert [query.at for query in busiest(queries, 4)] == [0, 1, 2, 3]
    assert busiest(queries, 100) == queries


def test_a_line_serves_what_was_simulated() -> None:
    each = replace(ONE, replicas=3, ranks=2, kv_dtype="fp8", settings=(("target_tpot", 0.04),))
    line = each.command("org/model")
    assert line == "chairlift serve org/model --replicas 3 --tensor-parallel 2 --kv-dtype fp8 --target-tpot 0.04"
    assert each.devices == 6


def run(tmp_path: Path, *options: str) -> Any:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": number / 20, "prompt_tokens": 2000, "output_tokens": 40} for number in range(120)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    return CliRunner().invoke(app, ["plan", str(trace), *options, "--json", str(tmp_path / "out.json")])


@pytest.mark.long
def test_the_command_finds_what_holds_and_what_does_not(tmp_path: Path) -> None:
    options = ["--hardware", "l40s,h200", "--tensor-parallel", "1", "--ttft-p99", "1s", "--tpot-p99", "30ms"]
    result = run(tmp_path, *options)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["holding"] and all(max(each["strain"].values()) <= 1 for each in found["holding"])
    prices = [each["price"] for each in found["holding"]]
    assert prices == sorted(prices)
    assert result.output.splitlines()[-1] == found["holding"][0]["command"]
    hopeless = run(tmp_path, "--hardware", "l40s", "--tensor-parallel", "1", "--tpot-p99", "1ms")
    assert "breaks first" in hopeless.output and "TPOT p99 is" in hopeless.output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "no target"),
        (["--ttft-p99", "1s", "--price", "h200"], "--price is 'h200'"),
        (["--ttft-p99", "1s", "--price", "h200=nan"], "--price is 'h200=nan'"),
        (["--ttft-p99", "0"], "--ttft-p99 is 0"),
        (["--tpot-p99", "nan"], "--tpot-p99 is nan"),
        (["--ttft-p99", "1s", "--duration", "0"], "there is no request"),
        (["--ttft-p99", "1s", "--tensor-parallel", "two"], "--tensor-parallel is 'two'"),
        (["--ttft-p99", "1s", "--tensor-parallel", "3,5"], "--tensor-parallel is 3, which does not divide 32 heads"),
        (["--ttft-p99", "1s", "--hardware", "abacus"], "no hardware 'abacus'"),
        (["--ttft-p99", "1s", "--kv-dtype", "fp3"], "--kv-dtype is 'fp3'"),
    ],
)
def test_wrong_options_of_a_plan_are_one_line(tmp_path: Path, options: list[str], why: str) -> None:
    result = run(tmp_path, *options)
    assert isinstance(result.exception, ChairliftError) and why in str(result.exception)


def test_ranks_that_serve_refuses_are_left_out() -> None:
    assert ranks_of("llama-3.1-8b", [1, 2, 3, 4, 16]) == [1, 2, 4, 16]
    assert ranks_of("smollm2-135m", [1, 2, 3, 4, 8]) == [1, 3]


def test_workers_simulate_the_whole_requests(tmp_path: Path) -> None:
    queries = [Query([7] * 300 + [number], 4, 5.0 * number, priority=number) for number in range(4)]
    shapes = {(16, "auto"): shape_of("stories15m")}
    candidate = Candidate("l40s", 1, 16, "auto")
    with started(1, tmp_path, queries, shapes, {"ttft": 1.0}) as workers:
        found = workers.check(True, candidate).summary
    assert found["cached_tokens"] == judge(shapes, {"ttft": 1.0}, queries, candidate).summary["cached_tokens"] > 0


def test_what_cannot_be_measured_is_named_or_left_out() -> None:
    candidate = Candidate("l40s", 1, 16, "auto")
    shapes = {(16, "auto"): shape_of("stories15m")}
    short = judge(shapes, {"tpot": 0.1}, [Query(20, 1)], candidate)  # no answer has a second token
    rejected = judge(shapes, {"ttft": 1.0}, [Query(20, 1), Query(10**6, 1)], candidate, to_the_end=True)
    out = Console(width=160, file=StringIO())
    out.print(tables(Plan([short], [rejected], []), "stories15m", "trace", lambda each: 1.0))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "1 request rejected: longer than" in text and "inf" not in text
