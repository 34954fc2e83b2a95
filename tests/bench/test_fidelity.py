"""Validation: the real engine's steps are measured, and a simulation of the same requests stands beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.bench.drive import MixResult, RequestRecord
from chairlift.bench.fidelity import calibrate, compare, hardware_of, waves
from chairlift.cli import app
from chairlift.core.cost import Cost
from chairlift.core.errors import ChairliftError
from chairlift.core.limits import Limits
from chairlift.core.settings import Settings
from chairlift.execution.build import assemble, load_model
from chairlift.simulation.replica import Hardware
from chairlift.traffic.query import Query

SMALL = {"max_sequences": 8, "max_length": 256, "kv_tokens": 4096}


def test_waves_are_of_all_batch_sizes_and_fit_the_engine(tiny_model: Path) -> None:
    settings = Settings.of(**SMALL)
    built = assemble(load_model(str(tiny_model), settings, progress=False), settings, progress=False)
    mixes = waves(built)
    assert [len(mix.queries) for mix in mixes] == [1, 2, 3, 4, 6, 8]
    longest = max(query.prompt_tokens for mix in mixes for query in mix.queries)
    assert 64 < longest <= min(256 - 25, built.limits.step_tokens)
    assert any(query.after_tokens for query in mixes[-1].queries), "some join while others decode"
    found = calibrate(built)
    assert found.steps >= 40
    pool = built.engine.scheduler.pool
    assert pool.available == pool.total
    hardware = hardware_of(built, found)
    assert (hardware.limits, hardware.kv_tokens, hardware.overlap) == (built.limits, 4096, False)


@pytest.mark.long
def test_validate_prints_both_and_simulate_reads_the_profile(tiny_model: Path, tmp_path: Path) -> None:
    numbers, profile = tmp_path / "numbers.json", tmp_path / "profile.json"
    flags = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    asked = [
        "--requests",
        "12",
        "--prompt-tokens",
        "8..60",
        "--output-tokens",
        "4..20",
        "--rate",
        "200",
        "--rate",
        "inf",
    ]
    result = CliRunner().invoke(app, ["validate", str(tiny_model), *asked, *flags, "--json", str(numbers)])
    assert result.exit_code == 0, result.output
    assert "held-out steps" in result.output and "simulated" in result.output
    runs = json.loads(numbers.read_text())["runs"]
    assert [len(run["compared"]) for run in runs] == [5, 5]
    assert all(each["real"] > 0 and each["simulated"] > 0 for run in runs for each in run["compared"])

    result = CliRunner().invoke(app, ["profile", "--shape", str(tiny_model), "--out", str(profile)])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, ["simulate", "uniform", "--requests", "20", "--hardware", str(profile)])
    assert result.exit_code == 0, result.output
    assert "20 finished" in result.output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--rate", "100", "--rate", "-1"], "the rate is -1.0"),
        (["--load", "0"], "--load is 0"),
        (["--load", "nan"], "--load is nan"),
        (["--workload", "nothing"], "there is no workload 'nothing'"),
        (["--workload", "TEXTS"], "prompts as text"),
    ],
)
def test_validate_refuses_wrong_options_before_anything_is_loaded(
    tmp_path: Path, options: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "Hello", "output_tokens": 4}')
    monkeypatch.setattr("chairlift.execution.build.load_model", lambda *_: pytest.fail("it was loaded"))
    command = ["validate", "--shape", "stories15m", *(str(texts) if each == "TEXTS" else each for each in options)]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ChairliftError) and why in str(result.exception)


def test_validate_refuses_requests_beyond_the_context_before_it_measures(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.execution.build.assemble", lambda *_: pytest.fail("it was assembled"))
    flags = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = CliRunner().invoke(app, ["validate", str(tiny_model), *flags, "--prompt-tokens", "900"])
    assert isinstance(result.exception, ChairliftError) and "the context holds 256" in str(result.exception)


def test_answers_of_one_token_are_compared_without_tpot() -> None:
    record = RequestRecord(Query([1] * 8, 1), 0.0, tokens=1, first=0.5, last=0.5)
    hardware = Hardware(Cost(fixed=0.001, token=0.0001), Limits(8, 64, 256, 100), 1024, 16, True)
    found = compare(MixResult(8, [record]), hardware, {})
    assert [one.name for one in found] == ["output tok/s", "TTFT p50, ms", "TTFT p99, ms"]


def test_settings_change_measured_hardware_and_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"shape": "x"}))
    with pytest.raises(ChairliftError, match="has no step times: write it with `chairlift profile"):
        Hardware.read(file, Settings.of())
    with pytest.raises(ChairliftError, match="there is no file"):
        Hardware.read(tmp_path / "none.json", Settings.of())
    hardware = {
        "cost": {"fixed": 0.001, "token": 0.0001},
        "limits": {"max_sequences": 8, "step_tokens": 64, "max_length": 256, "vocab_size": 100},
        "kv_tokens": 1024,
        "block_size": 16,
        "overlap": True,
        "host_tokens": 0,
    }
    file.write_text(json.dumps({"hardware": hardware}))
    found = Hardware.read(file, Settings.of(max_sequences=4, kv_tokens=128, overlap=False, host_tokens=64))
    assert (found.limits.max_sequences, found.limits.step_tokens, found.limits.max_length) == (4, 64, 128)
    assert (found.kv_tokens, found.block_size, found.overlap, found.host_tokens) == (128, 16, False, 64)
    assert Hardware.read(file, Settings.of()).limits.max_length == 256
