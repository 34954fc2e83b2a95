"""Recordings for the live page: simulate, compare and bench offline write them, and long runs are thinned out."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift import cli
from chairlift.core.errors import ChairliftError
from chairlift.engine import record_file


def recorded(file: Path, *command: str) -> dict[Any, dict[str, list[Any]]]:
    """Run a command that records, and return the steps, events and looks of each engine."""
    done = CliRunner().invoke(cli.app, [*command, "--record-view", str(file)])
    assert done.exit_code == 0, done.output
    head, *lines = map(json.loads, file.read_text().splitlines())
    assert (head["kind"], head["version"]) == (record_file.KIND, record_file.VERSION) and head["title"]
    found: dict[Any, dict[str, list[Any]]] = defaultdict(lambda: {"steps": [], "events": [], "look": []})
    for line in lines:
        own = found[line["model"], line.get("replica")]
        own["steps"] += line.get("steps", [])
        own["events"] += line.get("events", [])
        own["look"] += [line["look"]] if "look" in line else []
    return found


def count(events: list[Any], kind: str) -> int:
    return sum(event[0] == kind for event in events)


def test_a_simulation_records_every_request_of_every_replica(tmp_path: Path) -> None:
    flags = ("--requests", "80", "--rate", "40", "--replicas", "2")
    found = recorded(tmp_path / "run.jsonl", "simulate", "uniform", *flags)
    assert found.keys() == {("llama-3.1-8b", 0), ("llama-3.1-8b", 1)}
    assert sum(count(own["events"], "end") for own in found.values()) == 80
    for own in found.values():
        numbers = [step[0] for step in own["steps"]]
        assert numbers == list(range(1, len(numbers) + 1)), "no step is missing"
        assert count(own["events"], "admit") == count(own["events"], "end")
        assert own["look"][-1]["counts"][0] > 0
        starts = [step[1] for step in own["steps"]]
        assert starts == sorted(starts)


def test_a_long_run_is_thinned_out_and_keeps_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "MOST_STEPS", 64)
    [own] = recorded(tmp_path / "run.jsonl", "simulate", "uniform", "--requests", "60", "--rate", "20").values()
    numbers = [step[0] for step in own["steps"]]
    gaps = [after - before for before, after in pairwise(numbers)]
    assert gaps == sorted(gaps) and gaps[0] == 1 and gaps[-1] >= 4
    assert count(own["events"], "admit") == count(own["events"], "end") == 60


@pytest.mark.long
def test_a_comparison_records_one_run_of_each_cell(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--model", str(tiny_model), "--requests", "6", "--prompt-tokens", "4..8", "--output-tokens", "2..9")
    found = recorded(tmp_path / "run.jsonl", "compare", "--workload", "uniform", "--repeat", "2", *flags)
    assert found.keys() == {("static", None), ("continuous", None)}
    assert {count(own["events"], "end") for own in found.values()} == {6}


@pytest.mark.long
def test_a_benchmark_records_its_first_run(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--model", str(tiny_model), "--workload", "uniform", "--requests", "5", "--repeat", "2")
    flags += ("--prompt-tokens", "4..8", "--output-tokens", "2..9")
    [own] = recorded(tmp_path / "run.jsonl", "bench", "offline", *flags).values()
    assert count(own["events"], "end") == 5


def test_a_recording_that_cannot_be_written_is_named_before_anything_runs(tmp_path: Path) -> None:
    command = ["simulate", "uniform", "--requests", "2", "--record-view", str(tmp_path / "none" / "run.jsonl")]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 1 and "there is no such folder" in str(done.exception)


def test_a_full_disk_is_named_as_such() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(ChairliftError, match="/dev/full cannot be written: No space left on device"):
        record_file.RecordFile(full, "some run").close()
