"""Decode speed by batch size: only full decode steps are timed, and the floor has the same contexts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from chairlift.bench.plots import batch_sizes
from chairlift.bench.sizes import WARM, DecodeTimer, measure, read_sizes
from chairlift.commands.bench_sizes import sizes as command
from chairlift.core.errors import ChairliftError
from chairlift.models.families import outline, read_config

CPU = {"device": "cpu"}


@pytest.mark.parametrize("settings", [{}, {"overlap": True}], ids=str)
def test_every_size_has_all_its_full_steps_and_the_floor_of_their_contexts(
    tiny_model: Path, settings: dict[str, Any]
) -> None:
    told: list[int] = []
    prompt, output = 200, 12  # three such prompts take three steps of 256 tokens
    summary = measure(str(tiny_model), [1, 3], prompt, output, {**CPU, **settings}, advance=told.append)
    assert sum(told) == (1 + 3) * output, "the progress bar reaches its end"
    assert [row["size"] for row in summary["sizes"]] == [1, 3]
    config = read_config(json.loads((tiny_model / "config.json").read_text()))
    weights = outline(config)[0].read_bytes
    for row in summary["sizes"]:
        assert row["steps"] == output - 1 - WARM
        seen = sum(prompt + step for step in range(1 + WARM, output))  # by one sequence
        floor = (row["steps"] * weights + row["size"] * seen * outline(config)[0].kv_bytes_per_token()) / summary[
            "read_bytes_s"
        ]
        assert row["floor_tok_s"] == pytest.approx(row["size"] * row["steps"] / floor)
        assert row["output_tok_s"] == pytest.approx(1000 * row["size"] / row["step_ms"])
        assert row["floor_share"] == pytest.approx(row["output_tok_s"] / row["floor_tok_s"])


def test_a_step_lasts_from_the_end_of_the_previous_step_to_its_own() -> None:
    def plan(*starts: int) -> Any:
        sequence = SimpleNamespace(prompt_length=5)
        return SimpleNamespace(slices=[SimpleNamespace(sequence=sequence, start=at, count=1) for at in starts])

    watch = DecodeTimer(2)
    for _ in range(WARM):
        watch(plan(5, 5), 0.0, 1.0)
    watch(plan(6), 2.0, 1.0)  # not full
    watch(plan(6, 4), 4.0, 1.0)  # the end of a prompt
    assert watch.timed.steps == 0
    watch(plan(8, 6), 5.5, 1.0)  # half a second after the last, which is the host's time and counts
    assert (watch.timed.steps, watch.timed.seconds, watch.timed.contexts) == (1, 1.5, 9 + 7)


def test_a_batch_that_does_not_fit_in_memory_is_an_error(tiny_model: Path) -> None:
    with pytest.raises(ChairliftError, match=r"4 sequences of 60 tokens do not fit in one batch.*128 tokens"):
        measure(str(tiny_model), [1, 4], 40, 20, {**CPU, "kv_tokens": 128})


def test_a_batch_larger_than_the_default_step_is_one_step(tiny_model: Path) -> None:
    (row,) = measure(str(tiny_model), [260], 2, WARM + 3, CPU)["sizes"]
    assert (row["size"], row["steps"]) == (260, 2)


def invoke(*given: str) -> Any:
    app = Typer()
    app.command()(command)
    return CliRunner().invoke(app, given)


def test_numbers_are_written_shown_and_drawn_again(tiny_model: Path, tmp_path: Path) -> None:
    numbers, image = tmp_path / "sizes.json", tmp_path / "sizes.png"
    done = invoke("--shape", str(tiny_model), "--sizes", "2,1", "--prompt", "8", "--output", "8", "--device", "cpu",
                  "--json", str(numbers))  # fmt: skip
    assert done.exit_code == 0, done.exception
    again = invoke("--from-json", str(numbers), "--plot", str(image))
    assert again.exit_code == 0, again.exception
    assert again.stdout.splitlines()[1:] == done.stdout.splitlines()[-len(again.stdout.splitlines()) + 1 :]
    assert image.read_bytes().startswith(b"\x89PNG")
    summary = json.loads(numbers.read_text())
    (axes,) = batch_sizes(summary, "tiny").axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    floor, measured = axes.lines
    assert list(floor.get_ydata()) == [row["floor_tok_s"] for row in summary["sizes"]]
    assert list(measured.get_ydata()) == [row["output_tok_s"] for row in summary["sizes"]]


def test_sizes_are_whole_numbers_from_one_up() -> None:
    assert read_sizes("4, 1,4") == [1, 4]
    for text in ("a,b", "1,,2", "", "1.5"):
        with pytest.raises(ChairliftError, match="are not batch sizes"):
            read_sizes(text)
    with pytest.raises(ChairliftError, match="0 is not a batch size"):
        read_sizes("1,0")


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"cells": []}')
    for given, told in (
        (["--shape", "no-such-shape"], "one of stories15m"),
        (["--shape", "stories15m", "--prompt", "4000", "--output", "100"], "make 4,100, and the context holds 4,096"),
        (["--shape", "stories15m", "--output", "5"], "too short to time decoding: use 6 or more"),
        (["--sizes", "0"], "0 is not a batch size"),
        (["--plot", "picture.gif"], "is not a picture"),
        (["--json", str(tmp_path / "nowhere" / "file")], "there is no such folder"),
        (["--from-json", str(tmp_path / "nothing.json")], "cannot be read"),
        (["--from-json", str(other)], "holds no numbers of bench sizes"),
    ):
        error = invoke(*given).exception
        assert isinstance(error, ChairliftError) and told in str(error), given
    monkeypatch.setattr("chairlift.commands.reports.find_spec", lambda _name: None)
    assert "pip install 'chairlift[plots]'" in str(invoke("--plot", "picture.png").exception)
