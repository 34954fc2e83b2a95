"""Sampling parameters are checked once, when they are made, and whatever is wrong is named with its value."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from chairlift.core.errors import RequestError
from chairlift.core.params import SamplingParams

BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n is 0, out of range"),
    ({"n": 1.5}, "n is 1.5, not a whole number"),
    ({"n": True}, "n is True, not a whole number"),
    ({"n": "2"}, "n is '2', not a whole number"),
    ({"n": None}, "n is None, not a whole number"),
    ({"temperature": -0.1}, "temperature is -0.1, out of range"),
    ({"temperature": math.nan}, "temperature is nan, not a finite number"),
    ({"temperature": math.inf}, "temperature is inf, not a finite number"),
    ({"temperature": "hot"}, "temperature is 'hot', not a finite number"),
    ({"temperature": None}, "temperature is None, not a finite number"),
    ({"temperature": True}, "temperature is True, not a finite number"),
    ({"top_k": -2}, "top_k is -2, out of range"),
    ({"top_k": 0.5}, "top_k is 0.5, not a whole number"),
    ({"top_p": 0.0}, "top_p is 0"),
    ({"top_p": -0.5}, "top_p is -0.5, out of range"),
    ({"top_p": 1.01}, "top_p is 1.01, out of range"),
    ({"top_p": math.nan}, "top_p is nan, not a finite number"),
    ({"min_p": -0.1}, "min_p is -0.1, out of range"),
    ({"min_p": 1.1}, "min_p is 1.1, out of range"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0, out of range"),
    ({"repetition_penalty": math.inf}, "repetition_penalty is inf, not a finite number"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1, out of range"),
    ({"presence_penalty": -2.1}, "presence_penalty is -2.1, out of range"),
    ({"frequency_penalty": 2.1}, "frequency_penalty is 2.1, out of range"),
    ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1, out of range"),
    ({"logit_bias": {5: 101.0}}, "logit_bias of token 5 is 101.0, out of range"),
    ({"logit_bias": {5: -101.0}}, "logit_bias of token 5 is -101.0, out of range"),
    ({"logit_bias": {5: math.nan}}, "logit_bias of token 5 is nan, not a finite number"),
    ({"logit_bias": {-1: 1.0}}, "a token id in logit_bias is -1, out of range"),
    ({"logit_bias": {"5": 1.0}}, "a token id in logit_bias is '5', not a whole number"),
    ({"logit_bias": [5]}, "logit_bias is [5], not a mapping"),
    ({"logit_bias": 5}, "logit_bias is 5, not a mapping"),
    ({"seed": 2**63}, f"seed is {2**63}, out of range"),
    ({"seed": -(2**63) - 1}, f"seed is {-(2**63) - 1}, out of range"),
    ({"seed": 0.5}, "seed is 0.5, not a whole number"),
    ({"max_tokens": 0}, "max_tokens is 0, out of range"),
    ({"max_tokens": -1}, "max_tokens is -1, out of range"),
    ({"max_tokens": 10.0}, "max_tokens is 10.0, not a whole number"),
    ({"min_tokens": -1}, "min_tokens is -1, out of range"),
    ({"min_tokens": "1"}, "min_tokens is '1', not a whole number"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens is 6, more than max_tokens 5"),
    ({"stop": ""}, "stop holds ''"),
    ({"stop": ["a", ""]}, "stop holds ''"),
    ({"stop": ["a", 5]}, "stop holds 5"),
    ({"stop": 5}, "stop is 5, not a list"),
    ({"bad_words": [""]}, "bad_words holds ''"),
    ({"bad_words": [None]}, "bad_words holds None"),
    ({"bad_words": 5}, "bad_words is 5, not a list"),
    ({"stop_token_ids": [-1]}, "a token id in stop_token_ids is -1, out of range"),
    ({"stop_token_ids": ["x"]}, "a token id in stop_token_ids is 'x', not a whole number"),
    ({"stop_token_ids": 7}, "stop_token_ids is 7, not a list"),
    ({"stop_token_ids": "77"}, "a token id in stop_token_ids is '77', not a whole number"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": [1, -1]}, "a token id in allowed_token_ids is -1, out of range"),
    ({"allowed_token_ids": 7}, "allowed_token_ids is 7, not a list"),
    ({"logprobs": -2}, "logprobs is -2, out of range"),
    ({"logprobs": 65}, "logprobs is 65, out of range"),
    ({"logprobs": True}, "logprobs is True, not a whole number"),
    ({"prompt_logprobs": -2}, "prompt_logprobs is -2, out of range"),
    ({"prompt_logprobs": 65}, "prompt_logprobs is 65, out of range"),
    ({"ignore_eos": "no"}, "ignore_eos is 'no', not True or False"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1, not True or False"),
    ({"skip_special_tokens": None}, "skip_special_tokens is None, not True or False"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=[str(values) for values, _ in BAD])
def test_a_bad_value_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"top_k": -1},
        {"top_p": 1},
        {"min_p": 0},
        {"min_p": 1},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, 5: 100}},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": None, "min_tokens": 10_000},
        {"max_tokens": 5, "min_tokens": 5},
        {"logprobs": 0, "prompt_logprobs": 64},
    ],
    ids=str,
)
def test_values_at_the_edge_of_their_range_are_taken_as_they_are(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_one_stop_string_or_bad_word_is_a_list_of_one() -> None:
    params = SamplingParams(stop="end", bad_words="word")
    assert (params.stop, params.bad_words) == (("end",), ("word",))


def test_lists_become_tuples_and_none_becomes_nothing() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1], allowed_token_ids=[2])
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("a", "b"), (1,), (2,))
    nothing = SamplingParams(stop=None, bad_words=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert (nothing.stop, nothing.bad_words, nothing.stop_token_ids, nothing.logit_bias) == ((), (), (), {})


def test_what_the_caller_changes_later_does_not_reach_the_request() -> None:
    bias, stops = {1: 1.0}, [1]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stops)
    bias[2] = 5.0
    stops.append(2)
    assert (params.logit_bias, params.stop_token_ids) == ({1: 1.0}, (1,))


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (0.0, True), (0.001, False), (1.0, False)])
def test_only_temperature_zero_is_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_any_one_penalty_is_noticed(name: str) -> None:
    assert not SamplingParams().has_penalties
    assert SamplingParams(**{name: 1.5}).has_penalties
