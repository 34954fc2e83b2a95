"""The prefix cache as clients and operators see it: what was cached, for which tenant, and how it is forgotten."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from running import Running, keys_file, running

from chairlift.serving.service import salt_of

RESET = "/reset_prefix_cache"
PROMPT = list(range(10, 110))  # six blocks of 16, and some
CACHED = 96
BLOCKS = 256


@pytest.fixture(scope="module")
def started(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = keys_file(tmp_path_factory.mktemp("keys"), alice="", bob="")
    flags = ("--served-model-name", "tiny", "--api-keys", keys, "--max-length", "256", "--block-size", "16")
    with running(tiny_model, *flags, "--kv-tokens", str(16 * BLOCKS)) as found:
        found.key = "sk-key-of-operator"
        yield found


@pytest.fixture
def server(started: Running) -> Iterator[Running]:
    """With nothing in its cache; in the end no request holds a block, however many are cached."""
    assert started.post(RESET).status_code == 200
    yield started
    started.wait_until(started.is_idle)


def client_of(server: Running, key: str = "sk-key-of-alice") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def complete(client: OpenAI, prompt: Any = PROMPT, salt: str | None = None, **params: Any) -> Any:
    asked = {"temperature": 0, "max_tokens": 4, **params}
    return client.completions.create(
        model="tiny", prompt=prompt, extra_body={"ignore_eos": True, "cache_salt": salt}, **asked
    )


def cached(client: OpenAI, prompt: Any = PROMPT, salt: str | None = None, **params: Any) -> int:
    """What the reply says of its prompt."""
    return complete(client, prompt, salt, **params).usage.prompt_tokens_details.cached_tokens  # type: ignore[no-any-return]


# ---- what a reply tells


def test_the_second_of_two_equal_completions_tells_what_was_cached_whole_or_streamed(server: Running) -> None:
    client = client_of(server)
    first, second = complete(client), complete(client)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == CACHED
    assert second.usage.prompt_tokens == first.usage.prompt_tokens == 100
    assert second.choices[0].text == first.choices[0].text
    *_, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert last.usage == second.usage


def test_a_chat_that_goes_on_finds_what_was_said_before(server: Running) -> None:
    client = client_of(server)
    talk: Any = [{"role": "user", "content": "What is the question to which the answer is 42, and who asked it? " * 2}]

    def say(**params: Any) -> Any:
        return client.chat.completions.create(model="tiny", messages=talk, temperature=0, max_tokens=20, **params)

    first = say()
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    talk += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And?"}]
    second = say()
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 16 * 16 > 0
    *_, last = say(stream=True, stream_options={"include_usage": True})
    assert second.usage.prompt_tokens_details.cached_tokens <= last.usage.prompt_tokens_details.cached_tokens
    assert last.usage.prompt_tokens_details.cached_tokens < last.usage.prompt_tokens, "the last one is computed"


def test_a_prompt_counts_once_for_all_its_answers_and_several_prompts_add_up(server: Running) -> None:
    client = client_of(server)
    assert cached(client, n=2) == 0
    assert cached(client, n=2) == CACHED
    *_, last = complete(client, n=3, stream=True, stream_options={"include_usage": True})
    assert (last.usage.prompt_tokens, last.usage.prompt_tokens_details.cached_tokens) == (100, CACHED)
    assert cached(client, [PROMPT, PROMPT[::-1], PROMPT]) == 2 * CACHED


def test_a_block_is_of_use_for_its_first_tokens_alone(server: Running) -> None:
    client, before = client_of(server), server.metric("prefix_cache_copies_total")
    cached(client)
    assert cached(client, PROMPT[:88] + [9] * 12) == 88, "five blocks, and half of the sixth"
    server.wait_until(lambda: server.metric("prefix_cache_copies_total") == before + 1)


# ---- for which tenant


def test_another_salt_finds_nothing_and_the_same_one_does(server: Running) -> None:
    client = client_of(server)
    asked = ["one", "two", None, "one", "two", None, "on", "one/", "one/two"]
    assert [cached(client, salt=salt) for salt in asked] == [0, 0, 0, CACHED, CACHED, CACHED, 0, 0, 0]


def test_a_tenant_never_finds_what_another_has_asked(server: Running) -> None:
    alice, bob = client_of(server), client_of(server, "sk-key-of-bob")
    assert [cached(alice), cached(alice, salt="mine")] == [0, 0]
    guesses = [None, "mine", "alice", "alice/", "alice/mine", "/alice", "../alice/", "alice\x01mine"]
    assert [cached(bob, salt=salt) for salt in guesses] == [0] * len(guesses)
    assert [cached(alice), cached(alice, salt="mine"), cached(bob)] == [CACHED] * 3


def test_no_two_pairs_of_a_tenant_and_a_salt_are_one() -> None:
    tenants = ["", "a", "b", "a.b", "a-", "_"]
    salts = [None, "a", "b", "/", "/a", "a/", "a/b", "//", "a.b/", "_"]
    assert len({salt_of(*pair) for pair in product(tenants, salts)}) == len(tenants) * len(salts)
    assert salt_of("", None) == ""


# ---- what an operator sees and does


def test_a_reset_is_the_administrator_s_and_forgets_everybody_s(server: Running) -> None:
    alice, bob = client_of(server), client_of(server, "sk-key-of-bob")
    for client in (alice, bob):
        cached(client)
    assert server.post(RESET, headers={}).status_code == 401
    refused = server.post(RESET, headers={"Authorization": "Bearer sk-key-of-alice"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
    assert server.get(RESET).status_code == 405
    assert cached(alice) == CACHED, "nothing was forgotten yet"
    done = server.post(RESET)
    assert (done.status_code, done.json()) == (200, {"blocks": 2 * 6})
    assert [cached(alice), cached(bob), cached(alice)] == [0, 0, CACHED]


def test_who_runs_while_all_is_forgotten_goes_on(server: Running) -> None:
    client = client_of(server)
    whole = complete(client, max_tokens=100).choices[0].text
    chunks = iter(complete(client, max_tokens=100, stream=True))
    said = next(chunks).choices[0].text
    assert server.post(RESET).json()["blocks"] >= 6
    assert said + "".join(chunk.choices[0].text for chunk in chunks) == whole


def test_the_metrics_tell_tokens_looked_up_and_found_and_blocks_kept(server: Running) -> None:
    names = ("queries", "hits", "evictions", "copies")

    def totals() -> list[float]:
        return [server.metric(f"prefix_cache_{name}_total") for name in names]

    client, before = client_of(server), totals()
    for _ in range(2):
        cached(client)
    server.wait_until(server.is_idle)
    assert [now - then for now, then in zip(totals(), before, strict=True)] == [200, CACHED, 0, 0]
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric("kv_cache_cached_perc") == 6 / BLOCKS
    for first in range(20):  # 15 blocks each, which is more than there are
        cached(client, [first + 2] * 250, max_tokens=1)
    server.wait_until(server.is_idle)
    assert totals()[2] - before[2] > 0
    assert 0.9 < server.metric("kv_cache_cached_perc") <= 1
    assert cached(client) == 0, "the oldest has gone"


@pytest.mark.long
def test_with_the_cache_off_nothing_is_kept_and_a_reset_finds_nothing(tiny_model: Path) -> None:
    with running(tiny_model, "--no-prefix-cache", "--served-model-name", "tiny", fake=True) as server:
        client = client_of(server)
        assert [cached(client), cached(client)] == [0, 0]
        assert server.post(RESET).json() == {"blocks": 0}
        server.wait_until(server.is_idle)
        assert server.metric("prefix_cache_queries_total") == server.metric("kv_cache_cached_perc") == 0


@pytest.mark.long
def test_a_reset_that_the_engine_does_not_answer_is_told_so_in_time(tiny_model: Path) -> None:
    with running(tiny_model, "--served-model-name", "tiny", fake=True) as server:
        client, engine = client_of(server), server.engine_pid()
        cached(client)
        os.kill(engine, signal.SIGSTOP)
        try:
            reply = server.post(RESET)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "service_unavailable"
        assert int(reply.headers["retry-after"]) >= 1
        server.wait_until(lambda: server.post(RESET).status_code == 200)
        assert cached(client) == 0
