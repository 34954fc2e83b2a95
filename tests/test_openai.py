"""From a body as OpenAI's and vLLM's clients write it to SamplingParams."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift import SamplingParams
from chairlift.core.errors import RequestError
from chairlift.openai.options import check_stream
from chairlift.openai.params import (
    read_chat_params,
    read_completion_params,
    read_prompts,
    read_template_options,
)

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_an_empty_body_gets_openais_defaults() -> None:
    assert read_chat_params({"model": "m", "messages": MESSAGES}) == SamplingParams(max_tokens=None)
    assert read_completion_params({"model": "m", "prompt": "Hi"}) == SamplingParams(max_tokens=16)


def test_every_field_reaches_the_sampler() -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "seed": 7,
        "stop": ["\n", "END"],
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop_token_ids": [1, 2],
        "allowed_token_ids": [5, 6],
        "bad_words": ["bad"],
        "best_of": 3,
        "length_penalty": 0.5,
        "early_stopping": "never",
    }
    body = {**fields, "max_tokens": 9, "logit_bias": {"50": -100, "7": 1.5}, "logprobs": True, "top_logprobs": 4}
    expected = SamplingParams(**fields, max_tokens=9, logit_bias={50: -100, 7: 1.5}, logprobs=4)
    assert read_chat_params({**body, "messages": MESSAGES}) == expected


def test_beams_are_asked_for_as_in_vllm_whatever_the_temperature() -> None:
    search = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 2, "early_stopping": True}
    for sampling in ({}, {"temperature": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7}):
        for read in (read_chat_params, read_completion_params):
            params = read({**search, **sampling})
            assert (params.use_beam_search, params.n, params.width, params.length_penalty) == (True, 2, 4, 2)
            assert params.early_stopping is True


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"n": 2, "best_of": 3}, "best_of is 3 and n is 2, which cannot be streamed"),
        ({"n": 2, "use_beam_search": True}, "use_beam_search cannot be streamed"),
        ({"n": 2, "best_of": 4, "use_beam_search": True}, "use_beam_search cannot be streamed"),
    ],
)
def test_what_is_chosen_at_the_end_cannot_be_streamed(body: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        check_stream(read_chat_params(body))
    check_stream(read_chat_params({"n": 2, "best_of": 2}))


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert read_chat_params({"max_tokens": 5, "max_completion_tokens": 8}).max_tokens == 8


def test_null_is_as_good_as_absent() -> None:
    body = dict.fromkeys(("n", "temperature", "stop", "logit_bias", "logprobs", "tools", "max_tokens", "user"))
    assert read_chat_params(body) == SamplingParams(max_tokens=None)


def test_log_probabilities_are_asked_for_differently_in_chats_and_completions() -> None:
    assert read_chat_params({"logprobs": True}).logprobs == 0
    assert read_chat_params({"logprobs": False}).logprobs is None
    assert read_completion_params({"logprobs": 3}).logprobs == 3
    with pytest.raises(RequestError, match="top_logprobs needs logprobs"):
        read_chat_params({"top_logprobs": 3})
    with pytest.raises(RequestError, match="logprobs is True: use a whole number"):
        read_completion_params({"logprobs": True})


def test_what_changes_nothing_is_accepted() -> None:
    neutral = {"user": "u", "store": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    assert read_chat_params(neutral) == SamplingParams(max_tokens=None)
    assert read_completion_params({"echo": False, "best_of": None, "suffix": None}) == SamplingParams(max_tokens=16)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temprature": 1}, "unknown field 'temprature': did you mean temperature"),
        ({"guided_json": 5}, "guided_json: json is 5"),
        ({"prompt": "Hi"}, "unknown field 'prompt'"),
        ({"functions": [{"name": "f"}]}, "functions is not supported"),
        ({"response_format": {"type": "yaml"}}, "response_format is {'type': 'yaml'}"),
        ({"temperature": "hot"}, "temperature is 'hot': use a number"),
        ({"n": True}, "n is True: use a whole number"),
        ({"ignore_eos": 1}, "ignore_eos is 1: use true or false"),
        ({"n": 3, "best_of": 2}, "best_of is 2, out of range: use n or more"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon': use true, false or 'never'"),
        ({"early_stopping": 1}, "early_stopping is 1: use true, false or 'never'"),
        ({"use_beam_search": True, "stop": ["x"], "min_tokens": 2}, "does not support stop, min_tokens"),
        ({"stop": 5}, "stop is 5: use a string or a list of strings"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5: use a list of whole numbers"),
        ({"logit_bias": {"the": 1}}, "logit_bias has the key 'the': use token ids"),
        ({"logit_bias": {"5": "much"}}, "logit_bias of token 5 is 'much'"),
        ({"max_tokens": 0}, "max_tokens is 0, out of range"),
        ({"top_p": 2}, "top_p is 2, out of range"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read_chat_params(body)
    assert message in str(refusal.value)


def test_prompts_are_texts_or_token_ids_one_or_several() -> None:
    assert read_prompts({"prompt": "Hi"}) == ["Hi"]
    assert read_prompts({"prompt": [1, 2]}) == [[1, 2]]
    assert read_prompts({"prompt": ["a", [1]]}) == ["a", [1]]
    for wrong in (None, [], 5, [1, "a"], [[1, "a"]], {}):
        with pytest.raises(RequestError):
            read_prompts({"prompt": wrong})


def test_the_template_is_told_what_the_body_says() -> None:
    body = {"chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}
    assert read_template_options(body) == {"enable_thinking": False, "continue_final_message": True}
