"""Offline benchmarks: real engines in their own processes, on a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chairlift.bench.engines import Contender, UnavailableError, engine
from chairlift.bench.offline import Benchmark, agreement, measure, offline_table, run_offline, summarize
from chairlift.bench.peers import Task
from chairlift.core.errors import ChairliftError
from chairlift.report.numbers import percentile
from chairlift.traffic.workloads import Lengths, Workload, uniform


@pytest.mark.long
def test_one_engine_alone_is_measured_and_written_to_a_file(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    command = [sys.executable, "-m", "chairlift", "bench", "offline", "--model", str(tiny_model / "config.json")]
    command += ["--load-format", "dummy", "--workload", "uniform", "--requests", "5", "--prompt-tokens", "4..30"]
    command += ["--output-tokens", "3..9", "--repeat", "2", "--json", str(file), "--temperature", "0.6"]
    command += ["--profile-steps"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    labels = "output tok/s", "prompt tok/s", "requests/s", "TTFT p99, ms", "TPOT mean, ms", "peak memory, MiB"
    for label in (*labels, "of the physical floor", "the floor: ", "first token ", "the host's time"):
        assert label in done.stdout
    found = json.loads(file.read_text())
    assert found["workload"]["requests"] == 5
    [ours] = found["engines"]
    assert len(ours["runs"]) == 2 and ours["info"]["device"] == "cpu"
    assert (
        0 < ours["info"]["start"]["imported"] < ours["info"]["start"]["loaded"] < ours["info"]["start"]["first_token"]
    )
    assert ours["info"]["steps"]["sequences"] == 5
    for run in ours["runs"]:
        assert run["floor_share"] == pytest.approx(ours["info"]["floor_s"] / run["seconds"])
        assert run["output_tok_s"] == pytest.approx(found["workload"]["output_tokens"] / run["seconds"])
        assert 0 < run["ttft_p50"] <= run["ttft_p99"] <= 1000 * run["seconds"] and run["peak_mib"] > 1


@pytest.mark.long
def test_transformers_runs_interleaved_on_the_same_weights(tiny_model: Path) -> None:
    pytest.importorskip("transformers")
    notices: list[str] = []
    benchmark = Benchmark(
        str(tiny_model),
        {"load_format": "dummy", "device": "cpu"},
        uniform(6, Lengths(4, 40, 10), Lengths(1, 12, 4)),
        compare=["transformers", "transformers-static"],
        repeat=2,
    )
    workload, contenders = run_offline(benchmark, notices.append)
    names = ["chairlift", "transformers", "transformers-static"]
    assert [each.name for each in contenders] == names and not any(each.unavailable for each in contenders)
    assert [each.split(": ")[1] for each in notices if each.startswith("run ")] == names * 2
    summary = summarize(workload, contenders)
    for theirs in summary["engines"][1:]:
        assert theirs["median"]["agreement"] > 0.9, "with other weights answers would differ at the first token"
        assert theirs["ratio"]["output_tok_s"] > 0
    assert offline_table(summary).row_count == 13


def test_a_single_request_is_reported_in_milliseconds_per_token() -> None:
    run = {"seconds": 0.5, "peak_bytes": None, "requests": [{"first": 0.1, "last": 0.5, "tokens": [1] * 100}]}
    assert measure(run, Workload.of("single", [[1] * 8], [100]))["token_ms"] == 5.0
    two = {**run, "requests": run["requests"] * 2}
    assert "token_ms" not in measure(two, Workload.of("two", [[1] * 8] * 2, [100] * 2))


def test_other_engines_are_compared_only_with_greedy_answers(tiny_model: Path) -> None:
    benchmark = Benchmark(str(tiny_model), {}, Workload.of("one", [[1]], [1]), ["transformers"])
    with pytest.raises(ChairliftError, match="always take the likeliest token"):
        run_offline(replace(benchmark, temperature=0.6))


@pytest.mark.long
def test_a_request_that_cannot_be_served_is_a_one_line_error(tiny_model: Path) -> None:
    benchmark = Benchmark(str(tiny_model), {}, Workload.of("long", [[1] * 600], [1]))
    with pytest.raises(ChairliftError, match="the prompt has 600 tokens and the context holds 512"):
        run_offline(benchmark)


def task(scratch: Path) -> Task:
    (scratch / "workload.json").write_text(json.dumps({"prompts": [[1]], "outputs": [1]}))
    return Task(model="nowhere", scratch=str(scratch), device="cpu", threads=1, longest=2, total=2, dtype="float32")


@pytest.mark.long
def test_an_unavailable_engine_has_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot be started"), engine("openvino", "/no/python", task(tmp_path)):
        pass
    ours = engine("chairlift", sys.executable, task(tmp_path))
    with pytest.raises(UnavailableError, match="no model 'nowhere'"), ours:
        pass


def test_an_engine_ends_with_its_parent_process() -> None:
    code = "from chairlift.bench.peers.__main__ import listen; told = listen(); print('up', flush=True); told.get()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.stdin.close()
        assert (
            process.wait(20) == -signal.SIGKILL
        )  # its whole process group, with processes that a library may have forked


def test_an_engine_without_runs_is_in_the_table_with_its_reason() -> None:
    request = {"first": 0.5, "last": 1.0, "tokens": [1, 2]}
    ours = Contender("chairlift", {"device": "cpu", "dtype": "float32"})
    ours.runs.append({"seconds": 1.0, "peak_bytes": None, "requests": [request]})
    absent = Contender("openvino", unavailable="not [bold]installed")
    shown = offline_table(summarize(Workload.of("one", [[1]], [2]), [ours, absent]))
    assert "openvino is not available: not [bold]installed" in str(shown.caption)


def test_agreement_ends_where_answers_first_differ() -> None:
    def run(*answers: list[int]) -> dict[str, list[dict[str, list[int]]]]:
        return {"requests": [{"tokens": answer} for answer in answers]}

    assert agreement(run([1, 2, 3, 4], [5]), run([1, 2, 9, 4], [5])) == 3 / 5


def test_percentiles_lie_between_their_neighbours() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
