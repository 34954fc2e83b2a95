"""Limits of a key and of time, and clients that leave, as OpenAI's own Python client meets them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai_calls import MODEL, PROMPT, chat, client_of, complete, texts_of
from running import Running


def test_a_wrong_key_is_an_authentication_error(slow: Running) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        chat(client_of(slow, "sk-of-nobody"))
    assert caught.value.code == "invalid_api_key"


def test_too_high_a_priority_is_denied(slow: Running) -> None:
    allowed = client_of(slow, "sk-key-of-single")
    assert chat(allowed, max_tokens=1, extra_body={"priority": 3}).usage.completion_tokens == 1
    with pytest.raises(openai.PermissionDeniedError, match="priority is 4") as caught:
        chat(allowed, max_tokens=1, extra_body={"priority": 4})
    assert caught.value.param == "priority"


def test_one_request_too_many_is_a_rate_limit_error_that_says_when_to_return(slow: Running) -> None:
    single = client_of(slow, "sk-key-of-single")
    with chat(single, stream=True, max_tokens=400) as stream:
        next(stream)
        with pytest.raises(openai.RateLimitError) as caught:
            chat(single, max_tokens=1)
        assert caught.value.response.headers["retry-after"] in ("1", "2")
        assert caught.value.code == "tenant_limit"
    patient = client_of(slow, "sk-key-of-single").with_options(max_retries=5)
    assert chat(patient, max_tokens=1).usage.completion_tokens == 1


# ---- time, and leaving early


def test_a_request_s_own_timeout_ends_it_with_408(slow: Running, is_aborted: Callable[[], bool]) -> None:
    with pytest.raises(openai.APIStatusError, match=r"not done within its 0.3 s") as caught:
        chat(client_of(slow), max_tokens=400, extra_body={"timeout": 0.3})
    assert caught.value.status_code == 408
    slow.wait_until(is_aborted)


def test_a_stream_whose_time_is_over_ends_with_an_error_after_what_it_had(
    slow: Running, is_aborted: Callable[[], bool]
) -> None:
    chunks = []
    with pytest.raises(openai.APIError, match=r"not done within its 0.3 s"):
        for chunk in chat(client_of(slow), stream=True, max_tokens=400, extra_body={"timeout": 0.3}):
            chunks.append(chunk)
    assert texts_of(chunks)[0]
    slow.wait_until(is_aborted)


def test_a_client_that_runs_out_of_patience_takes_its_request_along(
    slow: Running, is_aborted: Callable[[], bool]
) -> None:
    with pytest.raises(openai.APITimeoutError):
        chat(client_of(slow, timeout=0.4), max_tokens=400)
    slow.wait_until(is_aborted)


@pytest.mark.parametrize("call", [chat, complete], ids=["chat", "completion"])
def test_closing_a_stream_aborts_its_request(
    slow: Running, is_aborted: Callable[[], bool], call: Callable[..., Any]
) -> None:
    with call(client_of(slow), stream=True, max_tokens=400) as stream:
        next(stream)
        assert slow.metric("kv_cache_usage_perc") > 0
    slow.wait_until(is_aborted)


def test_cancelling_an_async_stream_aborts_its_request(slow: Running, is_aborted: Callable[[], bool]) -> None:
    async def begin_and_cancel() -> None:
        async with AsyncOpenAI(base_url=f"{slow.url}/v1", api_key=slow.key, max_retries=0) as asking:
            begun = asyncio.Event()

            async def read() -> None:
                stream = await asking.completions.create(model=MODEL, prompt=PROMPT, max_tokens=400, stream=True)
                async for _ in stream:
                    begun.set()

            reading = asyncio.create_task(read())
            await begun.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading

    asyncio.run(begin_and_cancel())
    slow.wait_until(is_aborted)


def test_cancelling_a_plain_async_request_aborts_it(slow: Running, is_aborted: Callable[[], bool]) -> None:
    async def begin_and_cancel() -> None:
        async with AsyncOpenAI(base_url=f"{slow.url}/v1", api_key=slow.key, max_retries=0) as asking:
            call = asking.completions.create(model=MODEL, prompt=PROMPT, max_tokens=400)
            waiting = asyncio.create_task(call)
            await asyncio.to_thread(slow.wait_until, lambda: slow.metric("num_requests_running") == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(begin_and_cancel())
    slow.wait_until(is_aborted)


def test_many_clients_that_leave_at_any_moment_leave_nothing_behind(slow: Running) -> None:
    client = client_of(slow)

    def leave_after(chunks: int) -> None:
        with chat(client, stream=True, n=2, max_tokens=200) as stream:
            for _ in zip(range(chunks), stream, strict=False):
                pass

    threads = [threading.Thread(target=leave_after, args=[chunks]) for chunks in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slow.wait_until(slow.is_idle)
    assert chat(client, max_tokens=3).usage.completion_tokens == 3
