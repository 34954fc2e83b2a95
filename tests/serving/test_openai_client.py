"""The server as OpenAI's own Python client meets it: every answer compared with a plain call, a stream, and LLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_calls import GREEDY, MESSAGES, MODEL, PROMPT, SEEDED, chat, complete, texts_of
from running import Running

from chairlift import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    """The same model without a server."""
    return LLM(str(tiny_model), progress=False, max_length=256, kv_tokens=4096)


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def with_extra(params: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """The same call with more that is not OpenAI's."""
    return {**params, "extra_body": {**params.get("extra_body", {}), **extra}}


def tokens_of(usage: Any) -> tuple[int, int, int]:
    """Without those that were cached: the second of two equal requests finds more."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def streamed(call: Callable[..., Any], client: OpenAI, **params: Any) -> list[Any]:
    return list(call(client, stream=True, **params))


# ---- plain answers


def test_a_chat_completion_has_openai_s_shape(client: OpenAI) -> None:
    reply = chat(client)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == MODEL
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 24
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 24


def test_a_completion_has_openai_s_shape_and_16_tokens_when_nobody_says_how_many(client: OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True})
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert reply.choices[0].text
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16


def test_max_completion_tokens_bounds_a_chat_and_wins_over_its_older_name(client: OpenAI) -> None:
    assert chat(client, max_completion_tokens=5).usage.completion_tokens == 5


def test_the_models_are_listed_and_found_by_name(client: OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [MODEL]
    assert client.models.retrieve(MODEL) == listed[0]
    assert (listed[0].model_extra or {})["max_model_len"] == 256


def test_the_async_client_gets_the_same_answers_all_at_once(server: Running, client: OpenAI) -> None:
    prompts = [f"{PROMPT} for {number}" for number in range(8)]

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as asking:
            calls = [asking.completions.create(model=MODEL, prompt=prompt, **GREEDY) for prompt in prompts]
            return [reply.choices[0].text for reply in await asyncio.gather(*calls)]

    assert asyncio.run(ask_all()) == [complete(client, prompt=prompt).choices[0].text for prompt in prompts]


# ---- the same as LLM


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"seed": 5},
        {"seed": -(2**63)},
        {"seed": 5, "top_p": 0.3},
        {"seed": 5, "top_k": 2},
        {"seed": 5, "min_p": 0.5},
        {"temperature": 0, "repetition_penalty": 1.8},
        {"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 1.5},
        {"temperature": 0, "logit_bias": {"100": 90.0, "101": 89.5}},
        {"temperature": 0, "allowed_token_ids": [70, 80, 90]},
        {"temperature": 0, "bad_words": ["ist", "the"]},
        {"temperature": 0, "allowed_token_ids": [1], "min_tokens": 0},
        {"temperature": 0, "allowed_token_ids": [1, 90], "min_tokens": 3},
        {"temperature": 0, "allowed_token_ids": [1], "ignore_eos": True},
        {"temperature": 0, "allowed_token_ids": [90], "stop_token_ids": [90]},
    ],
    ids=str,
)
def test_every_parameter_does_what_it_does_in_llm(client: OpenAI, llm: LLM, params: dict[str, Any]) -> None:
    own = {**params, "logit_bias": {int(token): bias for token, bias in params.get("logit_bias", {}).items()}}
    expected = llm.chat(MESSAGES, SamplingParams(max_tokens=12, **own))[0]
    call = {**theirs(params), "max_tokens": 12, "extra_body": ours(params)}
    choices = [chat(client, **call), complete(client, prompt=expected.prompt_token_ids, **call)]
    for reply in choices:
        choice = reply.choices[0]
        assert choice.model_extra["token_ids"] == expected.outputs[0].token_ids
        assert choice.finish_reason == expected.outputs[0].finish_reason
        assert choice.model_extra["stop_reason"] == expected.outputs[0].stop_reason
    assert choices[0].choices[0].message.content == choices[1].choices[0].text == expected.outputs[0].text
    assert choices[0].model_extra["prompt_token_ids"] == expected.prompt_token_ids


OPENAI_S_OWN = {"temperature", "seed", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"}


def theirs(params: dict[str, Any]) -> dict[str, Any]:
    """Those parameters that the client has itself; without a temperature, the one of LLM."""
    return {"temperature": 1.0, **{name: value for name, value in params.items() if name in OPENAI_S_OWN}}


def ours(params: dict[str, Any]) -> dict[str, Any]:
    return {"return_token_ids": True, **{name: value for name, value in params.items() if name not in OPENAI_S_OWN}}


def test_a_prompt_may_be_a_text_or_token_ids_one_or_several(client: OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    other = "Everyone gets off"
    ids, other_ids = llm.tokenizer.encode(PROMPT), llm.tokenizer.encode(other)
    one, two = (complete(client, prompt=prompt).choices[0].text for prompt in (PROMPT, other))
    assert [choice.text for choice in complete(client, prompt=ids).choices] == [one]
    for prompt in ([PROMPT, other], [ids, other_ids]):
        reply = complete(client, prompt=prompt)
        assert [(choice.index, choice.text) for choice in reply.choices] == [(0, one), (1, two)]
        assert reply.usage.prompt_tokens == len(ids) + len(other_ids)
        assert reply.usage.completion_tokens == 48
        assert texts_of(streamed(complete, client, prompt=prompt)) == {0: one, 1: two}


def test_n_answers_have_their_indices_and_all_count(client: OpenAI) -> None:
    for call in (chat, complete):
        reply = call(client, n=4, **SEEDED)
        said = [getattr(choice, "text", None) or choice.message.content for choice in reply.choices]
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        assert len(set(said)) == 4
        assert reply.usage.completion_tokens == 4 * 24
        chunks = streamed(call, client, n=4, stream_options={"include_usage": True}, **SEEDED)
        assert texts_of(chunks) == dict(enumerate(said))
        assert chunks[-1].usage == reply.usage
        assert sum(1 for chunk in chunks for choice in chunk.choices if choice.finish_reason) == 4


def test_a_final_message_can_be_continued_and_the_generation_prompt_left_out(client: OpenAI, llm: LLM) -> None:
    def prompt_of(messages: Any, **extra: Any) -> str:
        assert llm.tokenizer is not None
        reply = chat(client, messages=messages, max_tokens=1, extra_body={"return_token_ids": True, **extra})
        return llm.tokenizer.decode(reply.model_extra["prompt_token_ids"], skip_special_tokens=False)

    asked = "<|begin|>user\nWhat is the answer?<|end|>\n"
    assert prompt_of(MESSAGES) == asked + "<|begin|>assistant\n"
    assert prompt_of(MESSAGES, add_generation_prompt=False) == asked
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    assert prompt_of(begun, continue_final_message=True) == asked + "<|begin|>assistant\nIt is"
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is the answer?"}]}]
    assert prompt_of(parts) == prompt_of(MESSAGES)


# ---- streams


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("usage", [True, False], ids=["with usage", "without usage"])
def test_a_chat_stream_says_the_same_as_the_plain_reply(client: OpenAI, params: dict[str, Any], usage: bool) -> None:
    plain = chat(client, **params)
    chunks = streamed(chat, client, **({"stream_options": {"include_usage": True}} if usage else {}), **params)
    assert texts_of(chunks) == {0: plain.choices[0].message.content}
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(choice.delta.role is None for chunk in chunks[1:] for choice in chunk.choices)
    said = chunks[:-1] if usage else chunks
    assert all(len(chunk.choices) == 1 for chunk in said)
    assert [chunk.choices[0].finish_reason for chunk in said] == [None] * (len(said) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in said)
    if usage:
        assert chunks[-1].choices == []
        assert tokens_of(chunks[-1].usage) == tokens_of(plain.usage)


@pytest.mark.parametrize("call", [chat, complete], ids=["chat", "completion"])
def test_every_chunk_has_the_usage_so_far_when_asked(client: OpenAI, call: Any) -> None:
    asked = with_extra({**SEEDED, "n": 2}, return_token_ids=True)
    plain = call(client, **asked)
    chunks = streamed(call, client, stream_options={"include_usage": True, "continuous_usage_stats": True}, **asked)
    sent, counted = 0, 0
    for chunk in chunks:
        sent += sum(len(getattr(choice, "token_ids", None) or []) for choice in chunk.choices)
        assert max(sent, counted) <= chunk.usage.completion_tokens <= 2 * 24
        counted = chunk.usage.completion_tokens
        assert chunk.usage.prompt_tokens == plain.usage.prompt_tokens
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + counted
    assert sent == counted == 2 * 24
    alone = streamed(call, client, stream_options={"continuous_usage_stats": True}, **SEEDED)
    assert all(chunk.usage is None for chunk in alone), "as in vLLM, it says how, and include_usage says whether"


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_completion_stream_says_the_same_as_the_plain_reply(client: OpenAI, params: dict[str, Any]) -> None:
    params = with_extra(params, return_token_ids=True)
    plain = complete(client, **params)
    chunks = streamed(complete, client, stream_options={"include_usage": True}, **params)
    *said, last = chunks
    assert texts_of(chunks) == {0: plain.choices[0].text}
    assert [token for chunk in said for token in chunk.choices[0].token_ids] == plain.choices[0].token_ids
    assert [chunk.choices[0].finish_reason for chunk in said] == [None] * (len(said) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert (last.choices, tokens_of(last.usage)) == ([], tokens_of(plain.usage))


@pytest.mark.parametrize("include", [False, True], ids=["left out", "included"])
def test_a_stop_string_ends_the_answer_and_no_part_of_it_is_ever_streamed(client: OpenAI, include: bool) -> None:
    whole = complete(client, max_tokens=40).choices[0].text
    stop = whole[9:15]  # over several tokens
    expected = whole[: whole.index(stop) + (len(stop) if include else 0)]
    params = with_extra(GREEDY, include_stop_str_in_output=include) | {"stop": ["never said", stop], "max_tokens": 40}
    plain = complete(client, **params)
    chunks = streamed(complete, client, stream_options={"include_usage": True}, **params)
    assert plain.choices[0].text == expected
    assert (plain.choices[0].finish_reason, plain.choices[0].stop_reason) == ("stop", stop)
    assert all(expected.startswith(texts_of(chunks[: end + 1])[0]) for end in range(len(chunks)))
    assert texts_of(chunks) == {0: expected}
    assert (chunks[-2].choices[0].finish_reason, chunks[-2].choices[0].stop_reason) == ("stop", stop)
    assert tokens_of(chunks[-1].usage) == tokens_of(plain.usage)
    assert plain.usage.completion_tokens < 40


# ---- log-probabilities


@pytest.mark.parametrize("stop", [None, "a stop string that holds text back"])
def test_the_log_probabilities_of_a_chat_are_those_of_llm_streamed_or_not(
    client: OpenAI, llm: LLM, stop: str | None
) -> None:
    params = {**GREEDY, "max_tokens": 12, "logprobs": True, "top_logprobs": 3, "stop": stop}
    plain = chat(client, **params).choices[0].logprobs.content
    pieces = [choice.logprobs for chunk in streamed(chat, client, **params) for choice in chunk.choices]
    assert [entry for piece in pieces if piece is not None for entry in piece.content] == plain
    own = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    answer = llm.chat(MESSAGES, own)[0].outputs[0]
    assert len(plain) == 12
    for entry, token, scores in zip(plain, answer.token_ids, answer.logprobs, strict=True):
        assert entry.logprob == pytest.approx(scores[token].logprob, abs=1e-4)
        assert entry.token == scores[token].decoded_token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == max(other.logprob for other in entry.top_logprobs)
        assert bytes(entry.bytes).decode(errors="replace") == entry.token


LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.mark.parametrize("echo", [False, True], ids=["alone", "with its prompt"])
@pytest.mark.parametrize("stop", [None, "a stop string that holds text back", "ist"])
def test_the_log_probabilities_of_a_completion_are_the_same_streamed(
    client: OpenAI, echo: bool, stop: str | None
) -> None:
    params = {**GREEDY, "logprobs": 2, "echo": echo, "stop": stop}
    plain = complete(client, **params).choices[0]
    chunks = streamed(complete, client, **params)
    assert texts_of(chunks) == {0: plain.text}
    pieces = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    for name in LISTS:
        assert [value for piece in pieces for value in getattr(piece, name)] == getattr(plain.logprobs, name), name


def test_an_echo_without_output_scores_a_prompt(client: OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(PROMPT)
    reply = complete(client, echo=True, logprobs=1, max_tokens=0)
    choice = reply.choices[0]
    assert choice.text == PROMPT
    assert "".join(choice.logprobs.tokens) == PROMPT
    assert choice.logprobs.token_logprobs[0] is None
    scores = llm.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=1))[0].prompt_logprobs
    for token, shown, found in zip(ids[1:], choice.logprobs.token_logprobs[1:], scores[1:], strict=True):
        assert shown == pytest.approx(found[token].logprob, abs=1e-4)
    for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
        assert PROMPT[offset:].startswith(token)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), 0)
    chunks = streamed(complete, client, echo=True, logprobs=1, max_tokens=0, stream_options={"include_usage": True})
    assert texts_of(chunks) == {0: PROMPT}
    assert chunks[-1].usage == reply.usage


def test_prompt_logprobs_come_in_the_shape_vllm_s_users_know(client: OpenAI, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=2))[0]
    told = complete(client, extra_body={"prompt_logprobs": 2}).choices[0].model_extra["prompt_logprobs"]
    assert told[0] is None
    for shown, scores in zip(told[1:], expected.prompt_logprobs[1:], strict=True):
        assert {int(token): each["rank"] for token, each in shown.items()} == {
            token: each.rank for token, each in scores.items()
        }
    asked = chat(client, extra_body={"prompt_logprobs": 0})
    assert len(asked.model_extra["prompt_logprobs"]) == asked.usage.prompt_tokens
    first = streamed(complete, client, extra_body={"prompt_logprobs": 2, "return_token_ids": True})[0].choices[0]
    assert first.model_extra["prompt_logprobs"] == told
    assert first.model_extra["prompt_token_ids"] == expected.prompt_token_ids
    first = streamed(chat, client, extra_body={"prompt_logprobs": 0, "return_token_ids": True})[0]
    assert first.model_extra["prompt_logprobs"] == asked.model_extra["prompt_logprobs"]
    assert len(first.model_extra["prompt_token_ids"]) == asked.usage.prompt_tokens


# ---- errors, as the client's own classes


@pytest.mark.parametrize(
    ("param", "value"),
    [("temperature", -1), ("top_p", 0), ("n", 0), ("max_tokens", 0), ("presence_penalty", 3), ("stop", "")],
)
def test_a_bad_value_is_a_bad_request_that_names_its_parameter(client: OpenAI, param: str, value: object) -> None:
    for call in (chat, complete):
        with pytest.raises(openai.BadRequestError) as caught:
            call(client, **{param: value})
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"
        assert param in caught.value.message


def test_a_bad_stream_is_refused_before_it_begins(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        chat(client, stream=True, top_logprobs=2)


def test_an_unknown_model_and_embeddings_are_not_found(client: OpenAI) -> None:
    for call in (chat, complete):
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-x'") as caught:
            call(client, model="gpt-x")
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.models.retrieve("gpt-x")
    with pytest.raises(openai.NotFoundError, match="has no embeddings"):
        client.embeddings.create(model=MODEL, input="text")
