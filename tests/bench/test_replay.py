"""Recorded steps replayed without the scheduler."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift import LLM, SamplingParams
from chairlift.bench.replay import replay_file
from chairlift.cli import app
from chairlift.core.errors import ChairliftError
from chairlift.execution.recording import RecordingExecutor

PROMPTS = [[5, 6, 7, 8], list(range(20, 60)), [9], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [30] * 40]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
def test_replayed_steps_give_the_recorded_tokens(tiny_model: Path, tmp_path: Path, overlap: bool) -> None:
    settings = {"overlap": overlap, "max_sequences": 3, "step_tokens": 16, "kv_tokens": 112, "max_length": 96}
    llm = LLM(str(tiny_model), progress=False, preemption="swap", **settings)
    file = StringIO()
    made = RecordingExecutor(llm.engine._executor, file, str(tiny_model), {**settings, "preemption": "swap"})
    llm.engine._executor = made
    drawn = SamplingParams(
        temperature=1.0, n=2, max_tokens=20, seed=3, bad_words=["a"], logit_bias={7: 2.0}, logprobs=1
    )
    beams = SamplingParams(use_beam_search=True, best_of=2, max_tokens=8)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, presence_penalty=0.5, prompt_logprobs=0)
    llm.generate(PROMPTS * 2, [drawn, greedy, beams, greedy, drawn] * 2, progress=False)
    assert llm.engine.scheduler.counters.preemptions, "this memory is short"
    path = tmp_path / "steps.jsonl"
    path.write_text(file.getvalue())
    assert '"restored"' in file.getvalue() and '"copies"' in file.getvalue()
    _, found = replay_file(path)
    assert found.steps > 40 and found.tokens == found.equal_tokens > 300 and found.first_difference is None
    llm.close()


@pytest.mark.long
def test_the_command_records_and_replays(tiny_model: Path, tmp_path: Path) -> None:
    file, runner = tmp_path / "steps.jsonl", CliRunner()
    command = ["bench", "offline", "--model", str(tiny_model / "config.json"), "--load-format", "dummy", "--workload"]
    command += ["uniform", "--requests", "4", "--prompt-tokens", "4..30", "--output-tokens", "3..9"]
    done = runner.invoke(app, [*command, "--record-steps", str(file)])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    sampled = sum(len(line["collect"]) for line in lines if "collect" in line)
    replayed = runner.invoke(app, ["bench", "replay", str(file)])
    assert replayed.exit_code == 0, replayed.output
    assert f"{sampled:,} of {sampled:,}" in replayed.output
    # A step that is not the recorded one shows.
    place = next(i for i, line in enumerate(lines) if "collect" in line)
    lines[place]["collect"][0] += 1
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "the first other one in step 0" in runner.invoke(app, ["bench", "replay", str(file)]).output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("[]\n", "not a recorded call"),
        ('{"a": 1}\n', "not a recording of steps"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_recording_is_told_so(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "steps.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ChairliftError, match=message):
        replay_file(file)
