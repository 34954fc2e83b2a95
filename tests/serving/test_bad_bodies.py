"""Bodies that a careless or hostile client sends: an error object each, and on it goes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from running import Running, refused

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
VOCABULARY, LENGTH = 384, 256


RAW = {
    "empty": b"",
    "blank": b"  \n",
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "-Infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "1e999": b'{"prompt": "x", "temperature": 1e999}',
    "a huge whole number": b'{"prompt": "x", "seed": ' + b"9" * 4000 + b"}",
    "a whole number beyond 64 bits": b'{"prompt": "x", "seed": 18446744073709551616}',
    "a huge id": b'{"prompt": [99999999999999999999999]}',
    "deep lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "33 levels": b'{"prompt": "x", "metadata": ' + b"[" * 33 + b"]" * 33 + b"}",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "overlong UTF-8": b'{"prompt": "\xc0\xaf"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "NUL": b'{"prompt": "a\\u0000b"}',
    "a raw NUL": b'{"prompt": "a\x00b"}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a lone low surrogate": b'{"prompt": "\\udc00x"}',
    "an array": b'["prompt"]',
    "a string": b'"prompt"',
    "a number": b"1",
    "null": b"null",
    "half of it": b'{"prompt": "x"',
    "two of it": b'{"prompt": "x"}{"prompt": "x"}',
    "a comment": b'{"prompt": "x" /* hello */}',
    "a key twice": b'{"prompt": "x", "prompt": "y"}',
    "a form": b"prompt=x&max_tokens=1",
    "too many items": b'{"prompt": [' + b"1," * 500_000 + b"1]}",
}


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object_is_refused(server: Running, name: str, path: str) -> None:
    refused(server.post(path, RAW[name], headers={"Content-Type": "application/json"}))


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(server: Running) -> None:
    large = b'{"prompt": "' + b"x" * (9 << 20) + b'"}'
    assert refused(server.post(COMPLETION, large), 413)["code"] == "body_too_large"
    pieces = (large[start : start + 65536] for start in range(0, len(large), 65536))
    assert refused(server.request("POST", COMPLETION, content=pieces), 413)["code"] == "body_too_large"


PROMPT = {"prompt": "x"}
BAD: dict[str, dict[str, Any]] = {
    "no prompt": {},
    "a prompt of null": {"prompt": None},
    "an empty prompt": {"prompt": ""},
    "no prompts": {"prompt": []},
    "one of no ids": {"prompt": [[]]},
    "an empty prompt among others": {"prompt": ["a", ""]},
    "a prompt of mixed things": {"prompt": ["a", 1]},
    "a prompt of floats": {"prompt": [1.5]},
    "a prompt of booleans": {"prompt": [True]},
    "an id below the vocabulary": {"prompt": [-1]},
    "an id above the vocabulary": {"prompt": [VOCABULARY]},
    "an id of 63 bits": {"prompt": [2**63 - 1]},
    "a prompt longer than the context": {"prompt": [5] * LENGTH},
    "a text longer than the context": {"prompt": "x y z " * 5000},
    "257 prompts": {"prompt": ["x"] * 257},
    "33 stops": {**PROMPT, "stop": ["a"] * 33},
    "a stop of 1025 characters": {**PROMPT, "stop": "a" * 1025},
    "an empty stop": {**PROMPT, "stop": ["a", ""]},
    "257 stop ids": {**PROMPT, "stop_token_ids": [1] * 257},
    "257 bad words": {**PROMPT, "bad_words": ["a"] * 257},
    "1025 biases": {**PROMPT, "logit_bias": {str(number): 1 for number in range(1025)}},
    "a bias of a word": {**PROMPT, "logit_bias": {"the": 1}},
    "a bias of a very long number": {**PROMPT, "logit_bias": {"9" * 5000: 1}},
    "a bias of -1": {**PROMPT, "logit_bias": {"-1": 1}},
    "a bias in other digits": {**PROMPT, "logit_bias": {"²": 1}},
    "a bias above the vocabulary": {**PROMPT, "logit_bias": {str(VOCABULARY): 1}},
    "a bias of 101": {**PROMPT, "logit_bias": {"5": 101}},
    "a bias that is a text": {**PROMPT, "logit_bias": {"5": "much"}},
    "nothing allowed": {**PROMPT, "allowed_token_ids": []},
    "an allowed id above the vocabulary": {**PROMPT, "allowed_token_ids": [VOCABULARY]},
    "a stop id above the vocabulary": {**PROMPT, "stop_token_ids": [VOCABULARY]},
    "a million answers": {**PROMPT, "n": 10**6},
    "65 answers": {**PROMPT, "n": 65},
    "half an answer": {**PROMPT, "n": 1.5},
    "65 alternatives": {**PROMPT, "logprobs": 65},
    "65 alternatives of the prompt": {**PROMPT, "prompt_logprobs": 65},
    "top_p of 0": {**PROMPT, "top_p": 0},
    "top_p of 2": {**PROMPT, "top_p": 2},
    "min_p of 2": {**PROMPT, "min_p": 2},
    "a penalty of 0": {**PROMPT, "repetition_penalty": 0},
    "a timeout of 0": {**PROMPT, "timeout": 0},
    "a timeout of a year": {**PROMPT, "timeout": 3.2e7},
    "an enormous priority": {**PROMPT, "priority": 2**40},
    "an empty salt": {**PROMPT, "cache_salt": ""},
    "a long salt": {**PROMPT, "cache_salt": "x" * 257},
    "more at least than at most": {**PROMPT, "min_tokens": 9, "max_tokens": 8},
    "stream_options without a stream": {**PROMPT, "stream_options": {"include_usage": True}},
    "a model that is a number": {**PROMPT, "model": 3},
    "a field with a very long value": {**PROMPT, "temperature": "x" * 100_000},
    **{
        f"a negative {name}": {**PROMPT, name: -5}
        for name in (
            *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "min_tokens"),
            *("frequency_penalty", "max_tokens", "max_completion_tokens", "logprobs", "prompt_logprobs", "timeout"),
        )
    },
    **{
        f"a list for {name}": {**PROMPT, name: [[1] * 50] * 2000}
        for name in ("n", "temperature", "seed", "stop", "stream", "timeout", "echo", "request_id", "logit_bias")
    },
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_value_that_cannot_be_is_refused(server: Running, name: str, stream: bool) -> None:
    if "stream" not in BAD[name] and "stream_options" not in BAD[name]:
        refused(server.post(COMPLETION, {**BAD[name], "stream": stream}))
    elif not stream:
        refused(server.post(COMPLETION, BAD[name]))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": None},
        {"messages": "Hello"},
        {"messages": []},
        {"messages": ["Hello"]},
        {"messages": [{}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": 3, "content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": ["x"] * 1000}]}]},
        {"messages": MESSAGES * 4097},
        {"messages": MESSAGES * 200},
        {"messages": MESSAGES, "top_logprobs": 2},
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 65},
        {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}},
        {"messages": MESSAGES, "chat_template_kwargs": {"template": "{{ 1 }}"}},
        {"messages": MESSAGES, "chat_template_kwargs": []},
        {"messages": MESSAGES, "add_generation_prompt": 1},
    ],
    ids=lambda body: str(body)[:70],
)
def test_a_conversation_that_cannot_be_is_refused(server: Running, body: Any) -> None:
    refused(server.post(CHAT, body))


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-300},
        {"temperature": 1e300, "repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"top_p": 1e-300, "min_p": 1},
        {"top_k": 2**62},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1, "presence_penalty": -2, "frequency_penalty": -2},
        {"max_tokens": 2**62, "min_tokens": 2**62, "stop_token_ids": [7]},
        {"n": 64, "logprobs": 64, "prompt_logprobs": 64},
        {"prompt": [5] * (LENGTH - 1)},
        {"prompt": [VOCABULARY - 1, 0, 1]},
        {"prompt": "\ufffd\u200b\U0010ffff"},
        {"priority": -(2**31), "cache_salt": "x", "timeout": 604800, "ttft": 604800},
        {"stop": ["x" * 1024] * 32, "bad_words": ["y" * 100] * 256},
        {"logit_bias": {str(token): -100 for token in range(VOCABULARY)}},
        {"allowed_token_ids": list(range(VOCABULARY)) * 50},
    ],
    ids=lambda extreme: str(extreme)[:60],
)
def test_an_extreme_value_within_its_bounds_is_served(server: Running, extreme: dict[str, Any]) -> None:
    response = server.post(COMPLETION, {"prompt": "x", "max_tokens": 3, **extreme})
    assert response.status_code == 200, response.text[:300]
    assert json.loads(response.text, parse_constant=pytest.fail)["choices"]  # no NaN, no Infinity


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(
    ("path", "body", "counts"),
    [
        (COMPLETION, {"prompt": [5] * 300, "max_tokens": 7}, "307 tokens (300 in the prompt, 7 in the completion)"),
        (COMPLETION, {"prompt": ["x", [5] * LENGTH]}, "272 tokens (256 in the prompt, 16 in the completion)"),
        (CHAT, {"messages": MESSAGES * 200, "max_completion_tokens": 9}, "in the messages, 9 in the completion)"),
        (CHAT, {"messages": MESSAGES * 200}, "in the messages, at least 1 in the completion)"),
    ],
    ids=["a prompt", "one of several prompts", "a conversation", "a conversation without max_tokens"],
)
def test_what_does_not_fit_the_context_is_refused_as_openai_refuses_it(
    server: Running, path: str, body: dict[str, Any], counts: str, stream: bool
) -> None:
    error = refused(server.post(path, {**body, "stream": stream}))
    field = "messages" if path == CHAT else "prompt"
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert f"maximum context length is {LENGTH} tokens" in error["message"]
    assert counts in error["message"] and error["message"].endswith(f"Please shorten the {field}.")
