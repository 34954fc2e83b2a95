"""LLM's keywords: vLLM's names are understood, and none is silently taken for something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, ChairliftError, SamplingParams
from chairlift.core.settings import options
from chairlift.core.vllm_names import ABSENT, RENAMED, flag_hint, setting_hint
from chairlift.text.outputs import RequestOutput

PROMPT = "The chairlift never stops"
TALK = [{"role": "user", "content": "Hello"}]
THREE = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), progress=False, max_length=256, kv_tokens=2048)


def written(llm: LLM, result: RequestOutput) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(result.prompt_token_ids, skip_special_tokens=False)


def test_vllm_s_names_of_params_and_progress_are_taken(llm: LLM) -> None:
    [expected] = llm.generate(PROMPT, THREE)
    assert len(expected.outputs[0].token_ids) == 3
    [found] = llm.generate(PROMPT, sampling_params=THREE, use_tqdm=False)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    [answer] = llm.chat(TALK, sampling_params=THREE, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 3
    chunks = list(llm.stream(PROMPT, sampling_params=THREE, use_tqdm=False))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.outputs[0].token_ids
    assert len(list(llm.stream_chat(TALK, sampling_params=THREE, use_tqdm=False))) == 3


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a sampling parameter": ({"max_tokens": 3}, "use SamplingParams(max_tokens=3)"),
    "another": ({"temperature": 0.5}, "use SamplingParams(temperature=0.5)"),
    "a slip": ({"sampling_parms": THREE}, "did you mean sampling_params?"),
    "both names of the params": (
        {"params": THREE, "sampling_params": THREE},
        "params and sampling_params are two names",
    ),
    "what vLLM has": ({"lora_request": object()}, "LoRA adapters are not supported"),
    "a dictionary as params": ({"params": {"max_tokens": 3}}, "use SamplingParams(...)"),
}


@pytest.mark.parametrize("method", ["generate", "chat", "stream", "stream_chat"])
@pytest.mark.parametrize(("keywords", "advice"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_keyword_is_an_error_that_says_what_to_use(
    llm: LLM, method: str, keywords: dict[str, Any], advice: str
) -> None:
    with pytest.raises(ChairliftError) as caught:
        getattr(llm, method)(TALK if "chat" in method else PROMPT, **keywords)
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_names_of_the_progress_bar_are_refused(llm: LLM) -> None:
    for call in (lambda **both: llm.generate(PROMPT, THREE, **both), lambda **both: llm.chat(TALK, THREE, **both)):
        with pytest.raises(ChairliftError, match="progress and use_tqdm"):
            call(progress=False, use_tqdm=False)


@pytest.mark.parametrize("method", ["chat", "stream_chat", "chat_prompt"])
def test_a_template_s_variable_is_given_by_name(llm: LLM, method: str) -> None:
    with pytest.raises(ChairliftError, match=r"chat_template_kwargs=\{'enable_thinking': False\}"):
        getattr(llm, method)(TALK, enable_thinking=False)
    with pytest.raises(ChairliftError, match=r"tools\[0\] is"):
        getattr(llm, method)(TALK, tools=[{"type": "function"}])
    with pytest.raises(ChairliftError, match="chat_template_kwargs has messages"):
        getattr(llm, method)(TALK, chat_template_kwargs={"messages": []})


def test_a_template_of_one_s_own_and_its_variables_are_used(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    [result] = llm.chat(TALK, THREE, chat_template=template, chat_template_kwargs={"mark": "!"}, tools=None)
    assert written(llm, result) == "Hello!>"
    [result] = llm.chat(TALK, THREE, chat_template=template, add_generation_prompt=False)
    assert written(llm, result) == "Hello"
    with pytest.raises(ChairliftError, match="chat_template is 5"):
        llm.chat(TALK, THREE, chat_template=5)
    with pytest.raises(ChairliftError, match="the chat template cannot be read"):
        llm.chat(TALK, THREE, chat_template="{% for %}")


def test_the_last_message_is_continued(llm: LLM) -> None:
    talk = [*TALK, {"role": "assistant", "content": "The answer"}]
    [result] = llm.chat(talk, THREE, add_generation_prompt=False, continue_final_message=True)
    assert written(llm, result).endswith("assistant\nThe answer")


def test_each_of_vllm_s_settings_is_answered_with_ours_or_a_reason() -> None:
    ours = {found.name for _, found in options()}
    assert set(RENAMED.values()) <= ours
    assert ours.isdisjoint(RENAMED) and ours.isdisjoint(ABSENT) and RENAMED.keys().isdisjoint(ABSENT)
    for name in ("max_model_len", "gpu_memory_utilization", "max_num_seqs", "swap_space", "trust_remote_code"):
        with pytest.raises(ChairliftError) as caught:
            LLM("unread", **{name: 1})
        assert str(caught.value) == setting_hint(name)
    assert flag_hint("--gpu-memory-utilization=0.9") == "--gpu-memory-utilization is called --memory-share here"
    assert flag_hint("--tensor-parallel-size") == "--tensor-parallel-size is called --tensor-parallel here"
