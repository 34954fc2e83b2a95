"""The best of several answers, and beams: in LLM, through the server with OpenAI's own client, and in batch files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from running import Running, keys_file, running

from chairlift import LLM, SamplingParams
from chairlift.core.errors import RequestError
from chairlift.offline.batch import run_batch
from mostly_long import mostly_long

PROMPT = "The chairlift never stops"
MESSAGES: Any = [{"role": "user", "content": "What is the answer?"}]
DRAWN: dict[str, Any] = {"seed": 11, "temperature": 1.2, "max_tokens": 24, "ignore_eos": True}
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.6, "max_tokens": 24}
THEIRS = {"n", "best_of", "seed", "temperature", "max_tokens", "logprobs", "stop", "stream", "timeout", "top_logprobs"}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), progress=False, max_length=256, kv_tokens=4096)


@pytest.fixture(autouse=True)
def nothing_is_lost(llm: LLM) -> Iterator[None]:
    """After each test no block is held, and every request is accounted for."""
    yield
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.owned == 0 and not llm.engine.scheduler.has_work


@pytest.fixture(scope="module")
def slow(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that takes seconds for an answer, and that wants keys."""
    keys = keys_file(tmp_path_factory.mktemp("keys"), metered="tokens_per_minute = 90")
    fake = {"FAKE_STEP": "0.005", "FAKE_SEQUENCES": "256"}
    with running(tiny_model, "--api-keys", keys, fake=True, environment=fake) as started:
        started.key = "sk-key-of-operator"
        yield started


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def complete(client: OpenAI, **params: Any) -> Any:
    asked = {name: value for name, value in params.items() if name in THEIRS}
    more = {name: value for name, value in params.items() if name not in THEIRS}
    return client.completions.create(model="", prompt=PROMPT, extra_body={"return_token_ids": True, **more}, **asked)


def chat(client: OpenAI, **params: Any) -> Any:
    asked = {name: value for name, value in params.items() if name in THEIRS - {"best_of"}}
    more = {name: value for name, value in params.items() if name not in asked}
    extra = {"return_token_ids": True, **more}
    return client.chat.completions.create(model="", messages=MESSAGES, extra_body=extra, **asked)


def ids_of(reply: Any) -> list[list[int]]:
    assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
    return [choice.model_extra["token_ids"] for choice in reply.choices]


def all_of(llm: LLM, count: int, **params: Any) -> list[Any]:
    """Every answer that best_of chooses from, with the log-probabilities that it goes by, as they were made."""
    return llm.generate(PROMPT, SamplingParams(n=count, logprobs=0, **params))[0].outputs


def likeliest(answers: list[Any]) -> list[Any]:
    ranked = sorted(answers, key=lambda answer: answer.cumulative_logprob, reverse=True)
    assert ranked[:2] != answers[:2], "another seed is needed: these would be the first without being chosen"
    return ranked


# ---- LLM


def test_the_best_of_several_answers_are_the_likeliest_of_those_that_are_drawn(llm: LLM) -> None:
    every = likeliest(all_of(llm, 6, **DRAWN))
    result = llm.generate(PROMPT, SamplingParams(n=2, best_of=6, **DRAWN))[0]
    assert [answer.token_ids for answer in result.outputs] == [answer.token_ids for answer in every[:2]]
    assert [answer.text for answer in result.outputs] == [answer.text for answer in every[:2]]
    assert [answer.index for answer in result.outputs] == [0, 1]
    for answer, expected in zip(result.outputs, every, strict=False):
        assert answer.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)
        assert answer.logprobs is None, "the request did not ask for them"
    assert result.metrics.output_tokens == 6 * 24


def test_log_probabilities_are_shown_where_they_were_asked_for(llm: LLM) -> None:
    for params in (SamplingParams(best_of=4, logprobs=2, **DRAWN), SamplingParams(logprobs=2, **BEAMS)):
        answer = llm.generate(PROMPT, params)[0].outputs[0]
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        assert all(2 <= len(scores) <= 3 for scores in answer.logprobs)
        chosen = [scores[token].logprob for token, scores in zip(answer.token_ids, answer.logprobs, strict=True)]
        assert answer.cumulative_logprob == pytest.approx(sum(chosen))


def test_what_comes_behind_a_stop_string_does_not_count_against_an_answer(llm: LLM) -> None:
    free = all_of(llm, 6, **DRAWN)
    stop = likeliest(free)[-1].text[2:4]  # the least likely of all is now the shortest
    every = likeliest(all_of(llm, 6, stop=stop, **DRAWN))
    result = llm.generate(PROMPT, SamplingParams(n=3, best_of=6, stop=stop, **DRAWN))[0]
    assert [answer.token_ids for answer in result.outputs] == [answer.token_ids for answer in every[:3]]
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", stop)
    assert result.metrics.output_tokens == sum(len(answer.token_ids) for answer in every) < 6 * 24


def test_the_best_cannot_be_streamed(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"best_of is 3 and n is 2: .* use generate\(\)"):
        llm.stream(PROMPT, SamplingParams(n=2, best_of=3))
    both = SamplingParams(n=2, best_of=2, seed=1, max_tokens=4, ignore_eos=True)
    assert {chunk.index for chunk in llm.stream(PROMPT, both)} == {0, 1}


def test_beams_tell_what_they_were_chosen_by(llm: LLM) -> None:
    ignored = {"temperature": 0.1, "top_p": 0.2, "top_k": 3, "min_p": 0.4, "seed": 5}
    plain, other = (llm.generate(PROMPT, SamplingParams(**BEAMS, **more))[0] for more in ({}, ignored))
    assert [answer.token_ids for answer in plain.outputs] == [answer.token_ids for answer in other.outputs]
    scores = [answer.cumulative_logprob / len(answer.token_ids) ** 0.6 for answer in plain.outputs]  # type: ignore[operator]
    assert len(scores) == 2 and 0 > scores[0] > scores[1]
    assert plain.outputs[0].logprobs is None


def test_a_request_that_is_left_leaves_none_of_its_answers(llm: LLM) -> None:
    long = {"max_tokens": 200, "ignore_eos": True}
    searches = [SamplingParams(best_of=5, **long), SamplingParams(use_beam_search=True, best_of=5, **long)]
    for params in searches:
        results = llm.iterate([("long", PROMPT, params), ("short", PROMPT, SamplingParams(max_tokens=2))])
        assert next(results)[0] == "short"
        assert llm.engine.scheduler.pool.owned > 0
        results.close()  # type: ignore[attr-defined]
        assert not llm.engine.scheduler.has_work


def test_an_answer_that_fails_is_never_hidden_behind_better_ones(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    free = all_of(llm, 3, **DRAWN)
    early = next(token for token in free[1].token_ids[:3] if all(token not in free[i].token_ids for i in (0, 2)))
    decoder = type(llm.engine._executor._decoder)
    passes, forward = 0, decoder.forward

    def fail_late(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*args) if passes < 15 else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "forward", fail_late)
        with pytest.raises(RequestError, match="division by zero"):
            llm.generate(PROMPT, SamplingParams(best_of=3, stop_token_ids=[early], **DRAWN))


# ---- the server


@pytest.mark.long
def test_a_completion_gives_the_best_answers_of_llm_and_counts_all_that_were_made(client: OpenAI, llm: LLM) -> None:
    every = likeliest(all_of(llm, 6, **DRAWN))
    reply = complete(client, n=2, best_of=6, **DRAWN)
    assert ids_of(reply) == [answer.token_ids for answer in every[:2]]
    assert [choice.text for choice in reply.choices] == [answer.text for answer in every[:2]]
    assert all(choice.logprobs is None for choice in reply.choices)
    usage = reply.usage
    assert (usage.completion_tokens, usage.total_tokens) == (6 * 24, usage.prompt_tokens + 6 * 24)
    shown = complete(client, n=1, best_of=6, logprobs=1, **DRAWN).choices[0]
    assert sum(shown.logprobs.token_logprobs) == pytest.approx(every[0].cumulative_logprob, abs=1e-3)


def test_a_chat_gives_its_best_answer_too_and_a_stop_string_is_kept(client: OpenAI, llm: LLM) -> None:
    every = likeliest(llm.chat(MESSAGES, SamplingParams(n=5, logprobs=0, **DRAWN))[0].outputs)
    assert ids_of(chat(client, best_of=5, **DRAWN)) == [every[0].token_ids]
    stop = every[-1].text[2:4]
    cut = likeliest(llm.chat(MESSAGES, SamplingParams(n=5, logprobs=0, stop=stop, **DRAWN))[0].outputs)
    reply = chat(client, best_of=5, stop=stop, **DRAWN)
    assert ids_of(reply) == [cut[0].token_ids]
    assert (reply.choices[0].finish_reason, reply.choices[0].stop_reason) == ("stop", stop)
    assert reply.choices[0].message.content == cut[0].text


def test_several_prompts_each_have_their_best(client: OpenAI) -> None:
    prompts = [PROMPT, "Everyone gets off"]
    more = {"ignore_eos": True, "return_token_ids": True}

    def ask(prompt: Any) -> Any:
        return client.completions.create(model="", prompt=prompt, n=2, best_of=4, seed=3, extra_body=more)

    one, two = (ask(prompt) for prompt in prompts)
    both = ask(prompts)
    assert ids_of(both) == ids_of(one) + ids_of(two)
    assert both.usage.completion_tokens == 2 * 4 * 16


@pytest.mark.parametrize("more", [{}, {"early_stopping": True}, {"early_stopping": "never", "length_penalty": -1.0}])
def test_beams_are_those_of_llm_in_both_endpoints(client: OpenAI, llm: LLM, more: dict[str, Any]) -> None:
    params = SamplingParams(**{**BEAMS, **more})
    for reply, expected in (
        (complete(client, **{**BEAMS, **more}), llm.generate(PROMPT, params)[0]),
        (chat(client, temperature=1, **{**BEAMS, **more}), llm.chat(MESSAGES, params)[0]),
    ):
        assert ids_of(reply) == [answer.token_ids for answer in expected.outputs]
        assert [choice.finish_reason for choice in reply.choices] == [a.finish_reason for a in expected.outputs]
        assert reply.usage.completion_tokens == sum(len(answer.token_ids) for answer in expected.outputs)
        assert all(choice.logprobs is None for choice in reply.choices)


def test_beams_show_the_log_probabilities_that_were_asked_for(client: OpenAI, llm: LLM) -> None:
    [expected, _] = llm.generate(PROMPT, SamplingParams(logprobs=1, **BEAMS))[0].outputs
    shown = complete(client, logprobs=1, **BEAMS).choices[0].logprobs
    assert sum(shown.token_logprobs) == pytest.approx(expected.cumulative_logprob, abs=1e-3)
    assert all(len(top) <= 2 for top in shown.top_logprobs)
    entries = chat(client, logprobs=True, top_logprobs=3, **BEAMS).choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 3 for entry in entries)


def test_a_search_is_timed_and_finds_its_prompt_in_the_cache(server: Running, client: OpenAI) -> None:
    client.completions.create(model="", prompt=[7] * 80, extra_body=BEAMS)
    seated = server.metric("request_queue_time_seconds_count")
    again = client.completions.create(model="", prompt=[7] * 80, extra_body=BEAMS)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 79, "all but the token to compute"
    assert server.metric("request_queue_time_seconds_count") == seated + 1


def test_answers_that_are_made_count_wherever_the_requests_are_measured(server: Running, client: OpenAI) -> None:
    names = ("request_params_n_sum", "generation_tokens_total")
    before = [server.metric(name) for name in names]
    complete(client, n=1, best_of=5, **DRAWN)
    assert [server.metric(name) for name in names] == [before[0] + 5, before[1] + 5 * 24]


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "best_of is 2, out of range: use n or more"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of", "best_of is 3 and n is 2, which cannot be streamed"),
        ({"best_of": 2000}, "best_of", "best_of is 2000 and the batch holds"),
        ({"use_beam_search": True, "n": 2, "stream": True}, "use_beam_search", "cannot be streamed"),
        ({"use_beam_search": "yes"}, "use_beam_search", "use true or false"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping", "'never'"),
        ({"use_beam_search": True, "length_penalty": 1000}, "length_penalty", "out of range"),
        ({"use_beam_search": True, "stop": ["x"]}, ..., "does not support stop"),
        ({"use_beam_search": True, "n": 40, "max_tokens": 200}, None, "40 beams .* KV blocks and there are 256"),
    ],
)
def test_what_cannot_be_done_is_a_bad_request_with_a_reason(
    server: Running, client: OpenAI, params: dict[str, Any], param: Any, message: str
) -> None:
    for call in (complete, chat):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            call(client, **params)
        assert caught.value.type == "invalid_request_error"
        assert param in (..., caught.value.param)
    assert server.is_healthy()


@pytest.mark.parametrize("search", [{"n": 2}, {"n": 2, "use_beam_search": True}], ids=["drawn", "beams"])
@pytest.mark.parametrize("call", mostly_long([complete, chat]))
def test_a_client_that_leaves_takes_all_answers_along(
    slow: Running, call: Callable[..., Any], search: dict[str, Any]
) -> None:
    impatient = OpenAI(base_url=f"{slow.url}/v1", api_key=slow.key, max_retries=0, timeout=0.5)
    before = slow.metric("requests_aborted_total")
    with pytest.raises(openai.APITimeoutError):
        call(impatient, best_of=6, max_tokens=400, **search)
    slow.wait_until(lambda: slow.metric("requests_aborted_total") == before + 1)
    slow.wait_until(slow.is_idle)


def test_beams_that_are_not_among_the_best_count_against_a_tenant_s_rate(slow: Running) -> None:
    metered = OpenAI(base_url=f"{slow.url}/v1", api_key="sk-key-of-metered", max_retries=0)
    search = {"use_beam_search": True, "best_of": 4}
    for _ in range(2):
        complete(metered, max_tokens=16)
    assert complete(metered, max_tokens=16, **search).usage.completion_tokens == 16
    with pytest.raises(openai.RateLimitError, match="has used its tokens_per_minute, 90"):
        complete(metered, max_tokens=16)
    slow.wait_until(slow.is_idle)


@pytest.mark.long
def test_searches_with_more_tokens_than_a_slow_reader_may_leave_unread_are_answered(slow: Running) -> None:
    # Most come in one step, as several messages, and none is read before the last: see BUFFER and _PART.
    body = {"prompt": [[5, 6]] * 64, "use_beam_search": True, "n": 4, "max_tokens": 140, "logprobs": 1}
    reply = slow.post("/v1/completions", body, timeout=120)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 64 * 4 * 140
    slow.wait_until(slow.is_idle)


# ---- batch files


def test_a_batch_file_may_ask_for_the_best_and_for_beams(llm: LLM, tmp_path: Path) -> None:
    def line(name: str, **body: Any) -> str:
        url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"

    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        line("best", prompt=PROMPT, n=2, best_of=6, **DRAWN)
        + line("beams", messages=MESSAGES, **BEAMS)
        + line("wrong", prompt=PROMPT, n=3, best_of=2)
    )
    tally = run_batch(llm, source, out)
    found = {each["custom_id"]: each["response"] for each in map(json.loads, out.read_text().splitlines())}
    every = likeliest(all_of(llm, 6, **DRAWN))
    best, beams = found["best"]["body"], found["beams"]["body"]
    assert [choice["text"] for choice in best["choices"]] == [answer.text for answer in every[:2]]
    assert best["usage"]["completion_tokens"] == 6 * 24
    expected = llm.chat(MESSAGES, SamplingParams(**BEAMS))[0].outputs
    assert [choice["message"]["content"] for choice in beams["choices"]] == [answer.text for answer in expected]
    assert [choice["index"] for choice in beams["choices"]] == [0, 1]
    assert found["wrong"]["status_code"] == 400
    assert (tally.done, tally.failed) == (2, 1)
    assert tally.tokens == 6 * 24 + sum(len(answer.token_ids) for answer in expected)
