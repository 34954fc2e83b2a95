"""The comparison with transformers in 16 bits detects agreement and disagreement."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from chairlift import LLM
from chairlift.commands.bench_agreement import agreement as command
from chairlift.core.errors import ChairliftError
from chairlift.evaluation import agreement
from chairlift.evaluation.agreement import (
    EngineResult,
    Float32Scores,
    TokenScores,
    agreement_table,
    measure,
    summarize,
    work,
)
from tiny import make_tiny_model

# torch warns at length on CPUs without 16-bit products.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

SETTINGS = {"device": "cpu", "dtype": "bfloat16"}
SIZE = {"prompts": 4, "prompt_tokens": 20, "tokens": 10}
ERRORS = ("forced_error_mean", "forced_error_max", "decoded_error_mean", "decoded_error_max")


@pytest.fixture(scope="module")
def found(tiny_model: Path) -> dict[str, Any]:
    told: list[int] = []
    summary = measure(str(tiny_model), SETTINGS, **SIZE, advance=told.append)
    assert sum(told) == work(SIZE["prompts"], SIZE["tokens"]), "the progress bar reaches its end"
    return summary


def test_our_errors_are_of_the_order_of_theirs(found: dict[str, Any]) -> None:
    for name in ERRORS:
        assert found["theirs"][name] > 1e-4, "16 bits lose something"
        assert 0.2 < found["ratio"][name] < 5
    assert found["ours"]["agrees"] >= 0.9 <= found["theirs"]["agrees"]
    assert found["ours"]["as_float32"] >= 0.8
    assert found["same_tokens"] > 0.5


@pytest.mark.long
def test_other_weights_are_detected_at_once(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_tiny_model(tmp_path, seed=1, tokenizer=False)
    monkeypatch.setattr(agreement, "LLM", lambda _folder, **settings: LLM(str(other), **settings))
    summary = measure(str(tiny_model), SETTINGS, **SIZE)
    assert summary["same_answers"] == 0
    assert summary["same_tokens"] < 0.1 > summary["ours"]["agrees"]
    assert summary["ratio"]["forced_error_mean"] > 20 < summary["ratio"]["decoded_error_mean"]


def test_decoding_and_teacher_forcing_match_transformers_own(tiny_model: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    prompts = [[5, 6, 7, 8], [300, 2, 9, 4]]
    with torch.inference_mode():
        answers, logprobs = agreement.decode(model, prompts, 6, lambda _count: None)
        expected = model.generate(torch.tensor(prompts), max_new_tokens=6, do_sample=False, eos_token_id=None)
        forced = agreement.force(model, prompts, answers, lambda _count: None)
    assert answers == expected[:, 4:].tolist()
    assert forced.likeliest == [token for answer in answers for token in answer]
    assert all(forced.agrees)
    assert forced.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.long
def test_random_weights_are_the_same_for_all(tiny_model: Path) -> None:
    settings = {**SETTINGS, "load_format": "dummy"}
    summary = measure(str(tiny_model / "config.json"), settings, prompts=4, prompt_tokens=3, tokens=5)
    assert summary["has_random_weights"]
    assert summary["ours"]["forced_error_max"] < 0.05


def test_each_number_by_hand() -> None:
    def scored(*entries: tuple[float, int, bool]) -> TokenScores:
        return TokenScores(*map(list, zip(*entries, strict=True)))  # type: ignore[arg-type]

    theirs = EngineResult([[1, 2], [3, 4]], [-1.0, -1.0, -1.0, -1.0], scored(*[(-1.0, 7, True)] * 4))
    ours = EngineResult([[1, 2], [9, 4]], [-1.5, -1.0, -1.0, -1.0], scored((-1.2, 7, True), *[(-1.0, 8, False)] * 3))
    truth = scored(*[(-1.1, 7, True)] * 4)
    summary = summarize(ours, theirs, Float32Scores(along_ours=scored(*[(-1.0, 0, True)] * 4), along_theirs=truth))
    assert (summary["same_answers"], summary["same_tokens"]) == (1, 2 / 4)
    assert (summary["ours"]["agrees"], summary["theirs"]["agrees"]) == (0.25, 1)
    assert (summary["ours"]["as_float32"], summary["theirs"]["as_float32"]) == (0.25, 1)
    assert summary["ours"]["decoded_error_max"] == 0.5
    assert summary["ours"]["decoded_error_mean"] == 0.125
    assert summary["theirs"]["decoded_error_mean"] == pytest.approx(0.1)
    assert summary["ratio"]["decoded_error_max"] == pytest.approx(5)


def test_all_numbers_can_be_written_and_shown(found: dict[str, Any]) -> None:
    screen = StringIO()
    Console(file=screen, width=120).print(agreement_table(json.loads(json.dumps(found))))
    assert f"{found['same_answers']} of 4" in screen.getvalue()
    assert f"{found['ratio']['forced_error_mean']:.2f}x" in screen.getvalue()


def refused(*given: str) -> str:
    app = Typer()
    app.command()(command)
    error = CliRunner().invoke(app, given).exception
    assert isinstance(error, ChairliftError)
    return str(error)


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "exclude each other" in refused("tiny", "--shape", "stories15m")
    assert "there is no such folder" in refused("--json", str(tmp_path / "nowhere" / "file"))
    assert "one of stories15m" in refused("--shape", "no-such-shape")
    assert "need a context of 4,101, and this one holds 4,096" in refused(
        "--shape", "stories15m", "--prompt-tokens", "4000", "--tokens", "100"
    )
    monkeypatch.setattr(agreement, "find_spec", lambda _name: None)
    assert "pip install 'chairlift[compare]'" in refused("--shape", "stories15m")
