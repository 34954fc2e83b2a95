"""Simulated traces: times that can be computed by hand, accounts, replicas, percentiles and the command."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from chairlift.cli import app
from chairlift.core.cost import Cost, Work, pairs_of
from chairlift.core.errors import ChairliftError
from chairlift.core.limits import Limits
from chairlift.core.plan import StepPlan
from chairlift.core.settings import Settings
from chairlift.costs.hardware import CHIPS, cost_of, kv_tokens
from chairlift.costs.shape import shape_of
from chairlift.report.numbers import percentile
from chairlift.simulation.replica import Hardware
from chairlift.simulation.run import SERIES, Outlook, Simulation
from chairlift.simulation.statistics import Histogram, Series
from chairlift.traffic.query import Query
from mostly_long import mostly_long

COST = Cost(fixed=0.002, weights=0.003, token=1e-4, context=1e-7, pair=1e-8, sample=1e-5)


def simulated(queries: list[Query], replicas: int = 1, **options: Any) -> Outlook:
    overlap = options.pop("overlap", False)
    room = options.pop("kv_tokens", 8192)
    hardware = Hardware(COST, Limits(16, 256, 4096, 1), room, 16, overlap)
    routing = options.pop("routing", "cache-aware")
    return Simulation(hardware, Settings.of(**options), replicas=replicas, routing=routing).run(queries)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
def test_a_request_alone_takes_the_time_of_its_steps(overlap: bool) -> None:
    found = simulated([Query(300, 4, at=5.0)], overlap=overlap)
    prompt = COST.seconds(Work(256, 0, pairs_of(0, 256))) + COST.seconds(Work(44, 0, pairs_of(256, 44), 1))
    decodes = [COST.seconds(Work(1, context, 0, 1)) for context in (300, 301, 302)]
    assert found.times["ttft"].most == pytest.approx(prompt)
    assert found.times["e2e"].most == pytest.approx(prompt + sum(decodes))
    assert found.times["tpot"].most == pytest.approx(sum(decodes) / 3)
    assert found.seconds == pytest.approx(5 + prompt + sum(decodes))


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "fair", "deadline", "longest-prefix", "multibin", "priority"])
@pytest.mark.parametrize("replicas", mostly_long([3, 1]))
def test_every_request_ends_with_all_its_tokens(policy: str, replicas: int) -> None:
    r = random.Random(7)
    queries = [
        Query(r.randint(1, 900), r.randint(1, 200), at=number / 20, tenant=r.choice("abc"), priority=r.randint(0, 2))
        for number in range(200)
    ]
    queries.append(Query(5000, 3, at=10.0))  # longer than the model's context
    found = simulated(queries, replicas, policy=policy, overlap=True)
    assert (found.requests, found.finished, found.rejected) == (201, 200, 1)
    assert found.output_tokens == sum(query.output_tokens for query in queries[:-1])
    assert found.times["ttft"].count == 200


def test_more_memory_means_fewer_preemptions() -> None:
    queries = [Query(100, 600) for _ in range(16)]
    tight, roomy = (simulated(list(queries), kv_tokens=room) for room in (4096, 65536))
    assert tight.preemptions > 0 == roomy.preemptions
    assert tight.seconds > roomy.seconds


def test_equal_blocks_of_a_trace_are_computed_once() -> None:
    queries = [Query(2048, 2, at=float(number), blocks=[1, 2, 3, 4 + number]) for number in range(4)]
    found = simulated(queries)
    assert found.cached_tokens == 3 * 3 * 512


def test_prefixes_stay_with_their_replica() -> None:
    queries = [Query(1024, 2, at=number / 4, blocks=[number % 8, 100 + number % 8]) for number in range(64)]
    aware, in_turn = (simulated(list(queries), 3, routing=each) for each in ("cache-aware", "round-robin"))
    assert aware.cached_tokens > in_turn.cached_tokens


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=300), st.sampled_from([50, 90, 99]))
@settings(max_examples=100, deadline=None)
def test_percentiles_are_those_of_the_values_next_to_them(values: list[float], share: int) -> None:
    found = Histogram()
    for value in values:
        found.add(value)
    ordered, exact = sorted(values), percentile(values, share)
    below = max(each for each in [ordered[0], *ordered] if each <= exact)
    above = min(each for each in [ordered[-1], *ordered] if each >= exact)
    assert 0.985 * below <= found.percentile(share) <= 1.015 * above


@given(st.lists(st.tuples(st.floats(0.001, 50), st.floats(0, 10)), min_size=1, max_size=200))
@settings(max_examples=50, deadline=None)
def test_a_series_keeps_the_whole_area_in_bounded_memory(steps: list[tuple[float, float]]) -> None:
    series, now, area = Series(("value",), most=16), 0.0, 0.0
    for seconds, value in steps:
        now += seconds
        area += seconds * value
        series.add(now, (value,))
    rows = series.rows()
    assert len(rows) <= 16
    last = now - rows[-1]["at"]
    total = sum(row["value"] * series.interval for row in rows[:-1]) + rows[-1]["value"] * last
    assert total == pytest.approx(area, rel=1e-6, abs=1e-9)


def test_figures_of_hardware_are_near_those_measured() -> None:
    shape = shape_of("llama-3.1-8b", 16, "auto")
    cost = cost_of(shape, CHIPS["h200"])
    assert cost.seconds(Work(1, 128, 0, 1)) == pytest.approx(4.14e-3, rel=0.05)  # docs/performance.md
    assert cost.seconds(Work(256, 256 * 760, 0, 256)) == pytest.approx(13.0e-3, rel=0.05)
    assert cost.seconds(Work(8192, 0, pairs_of(0, 8192), 1)) == pytest.approx(8192 / 39_800, rel=0.05)
    assert cost_of(shape, CHIPS["h200"], ranks=2).weights < 0.6 * cost.weights
    with pytest.raises(ChairliftError, match="more ranks"):
        kv_tokens(shape, replace(CHIPS["l40s"], memory=16e9))


def test_the_command_prints_tables_and_writes_numbers(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": number / 10, "prompt_tokens": 400, "output_tokens": 20} for number in range(50)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.json"
    command = ["simulate", str(trace), "--rate", "x2", "--target", "ttft:1000", "--json", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "50 finished" in result.output and "within TTFT 1000 ms" in result.output
    found = json.loads(out.read_text())
    assert found["requests"] == {"finished": 50, "rejected": 0}
    assert found["seconds"] == pytest.approx(2.5, abs=0.3)
    assert found["series"][0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--hardware", "abacus"], "no hardware 'abacus'"),
        (["--tensor-parallel", "3"], "--tensor-parallel is 3, which does not divide 32 heads over 8 KV heads"),
        (["--kv-link", "10"], "add --role prefill=1,decode=1"),
        (["--rate", "fast"], "--rate is 'fast'"),
        (["--target", "speed:3"], "'speed:3' is not a goodput target"),
        (["--model", "nothing"], "no config"),
        (["--duration", "0"], "there is no request"),
        (["--json", "."], "it is a folder"),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path: Path, options: list[str], why: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "prompt_tokens": 4, "output_tokens": 2}')
    result = CliRunner().invoke(app, ["simulate", str(trace), *options])
    assert result.exit_code != 0 and isinstance(result.exception, ChairliftError) and why in str(result.exception)


def test_a_wrong_workload_is_one_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    result = CliRunner().invoke(app, ["simulate", "nothing"])
    assert "there is no workload 'nothing': use halves, " in str(result.exception)
    result = CliRunner().invoke(app, ["simulate", str(tmp_path / "nothing.csv")])
    assert "nothing.csv cannot be read: No such file" in str(result.exception)
    trace.write_text('{"timestamp": 0}')
    result = CliRunner().invoke(app, ["simulate", str(trace)])
    assert "line 1, is not a valid arrival" in str(result.exception)


def test_a_profile_is_of_one_model_as_it_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"shape": "stories15m", "hardware": hardware().plain()}))
    command = ["simulate", "uniform", "--requests", "4", "--hardware", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "stories15m on 1" in result.output
    for flag, value in (("model", "stories15m"), ("tensor-parallel", "2"), ("weight-bits", "4"), ("kv-dtype", "fp8")):
        result = CliRunner().invoke(app, [*command, f"--{flag}", value])
        assert f"--{flag} is {value}, and {file} has the step times of one model" in str(result.exception)


def hardware(overlap: bool = False, step_tokens: int = 256) -> Hardware:
    return Hardware(COST, Limits(16, step_tokens, 4096, 1), 8192, 16, overlap)


def test_goodput_counts_good_requests_beside_rejected_ones() -> None:
    queries = [Query(100_000 if number % 2 else 20, 4, float(number)) for number in range(10)]
    summary = Simulation(hardware(), Settings(), targets={"e2e": 60.0}).run(queries).summary()
    assert summary["requests"] == {"finished": 5, "rejected": 5}
    assert summary["good"] == 0.5
    assert summary["good_s"] == pytest.approx(summary["requests_s"])


def test_a_device_is_busy_until_the_last_token_and_not_beyond_it() -> None:
    assert simulated([Query(20, 3)], overlap=True).summary()["busy"] == pytest.approx(1.0)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_nothing_runs_between_two_requests_far_apart(overlap: bool, replicas: int) -> None:
    found = simulated([Query(20, 3), Query(20, 3, at=100.0)], replicas, overlap=overlap)
    rows = [row for series in found.series for row in series.rows()]
    assert max(row["running"] for row in rows) > 0
    assert all(row[name] == 0 for row in rows if 1 <= row["at"] < 99 for name in SERIES)


def test_a_computed_prompt_is_no_work_for_its_replica_any_more() -> None:
    queries = [Query(3000, 400), *(Query(20, 400, 1.5 + number / 1e6) for number in range(8))]
    simulation = Simulation(hardware(step_tokens=4096), Settings(), replicas=2, routing="least-loaded")
    placed = [0, 0]

    def see(number: int, plan: StepPlan, *_: object) -> None:
        placed[number] += len(plan.placed)

    simulation.on_step = see
    simulation.run(queries)
    assert sorted(placed) == [4, 5]


def test_prompts_of_equal_tokens_are_routed_to_the_replica_that_has_them() -> None:
    prefixes = [[7] * 192, [8] * 192]
    queries = [Query([*prefixes[number % 3 == 0], number], 2, 20.0 * number) for number in range(12)]
    assert simulated(queries, replicas=2).cached_tokens == 10 * 192
