"""What the Responses and the Messages API share with chat completions: keys, limits, time, and leaving early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from openai_calls import MODEL
from running import Running

KEY = "sk-key-of-operator"
MESSAGES: Any = [{"role": "user", "content": "Hello"}]


def respond(server: Running, key: str = KEY, **params: Any) -> Any:
    client = OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
    return client.responses.create(**{"model": MODEL, "input": "Hello", "max_output_tokens": 400, **params})


def ask(server: Running, key: str = KEY, **params: Any) -> Any:
    client = Anthropic(base_url=server.url, api_key=key, max_retries=0)
    return client.messages.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 400, **params})


CALLS = pytest.mark.parametrize("call", [respond, ask])


@CALLS
def test_closing_a_stream_frees_its_blocks(slow: Running, is_aborted: Callable[[], bool], call: Any) -> None:
    with call(slow, stream=True) as stream:
        next(stream)
        assert slow.metric("kv_cache_usage_perc") > 0
    slow.wait_until(is_aborted)


@CALLS
def test_a_client_that_disconnects_takes_its_request_along(
    slow: Running, is_aborted: Callable[[], bool], call: Any
) -> None:
    with pytest.raises((openai.APITimeoutError, anthropic.APITimeoutError)):
        call(slow, timeout=0.4)
    slow.wait_until(is_aborted)


def test_a_response_whose_time_is_over_fails_after_what_it_had(slow: Running, is_aborted: Callable[[], bool]) -> None:
    events = list(respond(slow, stream=True, extra_body={"timeout": 0.3}))
    assert [event.type for event in events[-3:]] == ["response.output_item.done", "error", "response.failed"]
    assert "not done within its 0.3 s" in events[-2].message
    failed = events[-1].response
    assert (failed.status, failed.error.message) == ("failed", events[-2].message)
    assert failed.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta") != ""
    slow.wait_until(is_aborted)


def test_a_message_whose_time_is_over_ends_with_an_error(slow: Running, is_aborted: Callable[[], bool]) -> None:
    seen = []
    with pytest.raises(anthropic.APIStatusError, match=r"not done within its 0.3 s") as caught:
        for event in ask(slow, stream=True, extra_body={"timeout": 0.3}):
            seen.append(event.type)
    body: Any = caught.value.body
    assert body["error"]["type"] == "timeout_error"
    assert seen[:2] == ["message_start", "content_block_start"]
    slow.wait_until(is_aborted)


def test_time_that_is_over_before_the_first_token_still_makes_a_whole_stream(slow: Running) -> None:
    kinds = [event.type for event in respond(slow, stream=True, extra_body={"timeout": 0.001})]
    assert kinds == ["response.created", "response.in_progress", "error", "response.failed"]
    with pytest.raises(anthropic.APIStatusError, match=r"not done within its 0.001 s"):
        list(ask(slow, stream=True, extra_body={"timeout": 0.001}))
    slow.wait_until(slow.is_idle)


@CALLS
def test_one_request_too_many_is_a_rate_limit_error_in_each_api(slow: Running, call: Any) -> None:
    with respond(slow, "sk-key-of-single", stream=True) as stream:
        next(stream)
        with pytest.raises((openai.RateLimitError, anthropic.RateLimitError)) as caught:
            call(slow, "sk-key-of-single")
        assert caught.value.response.headers["retry-after"] in ("1", "2")
    slow.wait_until(slow.is_idle)


@CALLS
def test_a_wrong_key_is_an_authentication_error_in_each_api(slow: Running, call: Any) -> None:
    with pytest.raises((openai.AuthenticationError, anthropic.AuthenticationError), match="no valid API key"):
        call(slow, "sk-of-nobody")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_key_may_come_as_x_api_key(slow: Running, path: str) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
    wrong = {"x-api-key": "sk-of-nobody"}
    assert slow.post(path, body, headers={"x-api-key": KEY, "anthropic-version": "2023-06-01"}).status_code == 200
    assert slow.post(path, body, headers=wrong).status_code == 401
    assert slow.post(path, body, headers={"Authorization": f"Bearer {KEY}"} | wrong).status_code == 200
    assert slow.get("/metrics", headers={"x-api-key": "sk-key-of-single"}).status_code == 403


def test_a_base_url_with_v1_too_many_gets_a_hint(slow: Running) -> None:
    with pytest.raises(anthropic.NotFoundError, match="an Anthropic client ends without /v1"):
        Anthropic(base_url=f"{slow.url}/v1", api_key=KEY, max_retries=0).messages.create(
            model=MODEL, messages=MESSAGES, max_tokens=1
        )


@CALLS
def test_a_request_s_own_state_is_found_by_the_id_of_its_reply(slow: Running, call: Any) -> None:
    with call(slow, stream=True) as stream:
        first = next(stream)
        id = first.response.id if hasattr(first, "response") else first.message.id
        assert slow.get(f"/v1/requests/{id}").status_code == 200
    slow.wait_until(slow.is_idle)
