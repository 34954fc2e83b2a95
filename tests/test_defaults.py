"""A request that names no sampling gets the model's own, wherever it comes from; what it names wins."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.errors import SettingsError
from chairlift.offline.batch import CHAT, COMPLETIONS, run_batch
from serving.running import running
from tiny import make_tiny_model

# With top_k at 1 an answer is the greedy one whatever the temperature: whoever applies these values is seen at once.
OWN = {"temperature": 0.9, "top_k": 1, "repetition_penalty": 1.3, "max_new_tokens": 9}
TALK = [{"role": "user", "content": "Hello"}]
GREEDY = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=9)
WILD = SamplingParams(temperature=3.0, seed=5, max_tokens=9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("defaults"))
    said = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**said, **OWN}))
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), progress=False, max_length=256, kv_tokens=1024)


def test_in_process_the_defaults_are_used_without_params_and_params_are_taken_as_they_are(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=0.9, top_k=1, repetition_penalty=1.3, max_tokens=9
    )
    expected = llm.generate("The chair", GREEDY)[0].outputs[0]
    assert llm.generate("The chair")[0].outputs[0].token_ids == expected.token_ids
    assert "".join(chunk.text for chunk in llm.stream("The chair")) == expected.text
    wild = llm.generate("The chair", WILD)[0].outputs[0]
    alike = llm.generate("The chair", replace(WILD, top_k=1))[0].outputs[0]
    assert wild.token_ids != alike.token_ids, "a given SamplingParams has nothing of the model's"


def test_they_can_be_turned_off(model: Path) -> None:
    plain = LLM(str(model), progress=False, max_length=256, kv_tokens=1024, generation_config="none")
    assert plain.get_default_sampling_params() == SamplingParams()
    with pytest.raises(SettingsError, match="generation_config is 'vllm': use one of auto, none"):
        LLM(str(model), generation_config="vllm")


@pytest.mark.long
def test_a_server_applies_them_field_by_field_and_says_so(llm: LLM, model: Path) -> None:
    greedy = replace(GREEDY, max_tokens=6)
    drawn = SamplingParams(temperature=0.9, repetition_penalty=1.3, seed=5, max_tokens=6)
    text = llm.generate("The chair", greedy)[0].outputs[0].text
    said = llm.chat(TALK, greedy)[0].outputs[0].text
    wild = llm.generate("The chair", drawn)[0].outputs[0].text
    beams = llm.generate("The chair", SamplingParams(use_beam_search=True, best_of=2, max_tokens=6))[0].outputs[0].text
    assert wild != text
    with running(model, "--max-length", "256", "--kv-tokens", "1024") as server:
        assert any("sampling   temperature 0.9, top_k 1, repetition_penalty 1.3" in line for line in server.lines)

        def completion(**more: Any) -> str:
            reply = server.post(COMPLETIONS, {"prompt": "The chair", "max_tokens": 6, **more})
            return str(reply.json()["choices"][0]["text"])

        assert completion() == completion(top_k=None) == text
        assert completion(top_k=0, seed=5) == wild
        assert completion(use_beam_search=True, best_of=2) == beams
        reply = server.post(CHAT, {"messages": TALK, "max_tokens": 6})
        assert reply.json()["choices"][0]["message"]["content"] == said
        whole = server.post(CHAT, {"messages": TALK}).json()
        assert whole["usage"]["completion_tokens"] <= 9
        assert whole["choices"][0]["message"]["content"] == llm.chat(TALK)[0].outputs[0].text
    with running(model, "--max-length", "256", "--kv-tokens", "1024", "--generation-config", "none") as server:
        assert any("sampling   temperature 1 where a request names none" in line for line in server.lines)
        reply = server.post(COMPLETIONS, {"prompt": "The chair", "max_tokens": 6, "seed": 5})
        plain = llm.generate("The chair", SamplingParams(seed=5, max_tokens=6))[0].outputs[0].text
        assert reply.json()["choices"][0]["text"] == plain != text


def test_a_batch_file_applies_them(llm: LLM, tmp_path: Path) -> None:
    asked = {"prompt": "The chair", "max_tokens": 6}
    line = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": asked}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    [found] = (tmp_path / "out.jsonl").read_text().splitlines()
    text = llm.generate("The chair", replace(GREEDY, max_tokens=6))[0].outputs[0].text
    assert json.loads(found)["response"]["body"]["choices"][0]["text"] == text


@pytest.mark.long
def test_the_command_line_applies_them_and_its_flags_win(llm: LLM, model: Path) -> None:
    def run(*flags: str) -> str:
        command = [sys.executable, "-m", "chairlift", "run", "--raw", "The chair", "-m", str(model), *flags]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.removesuffix("\n")

    assert run() == llm.generate("The chair", GREEDY)[0].outputs[0].text
    named = replace(llm.get_default_sampling_params(), top_k=0, seed=3, max_tokens=5)
    assert (
        run("--top-k", "0", "--seed", "3", "--max-tokens", "5") == llm.generate("The chair", named)[0].outputs[0].text
    )
