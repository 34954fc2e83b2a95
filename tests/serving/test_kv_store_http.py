"""Replicas that share evicted KV through a real Redis server, and what clients see when that is lost: nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer, needs_redis
from running import Running, running
from test_replicas import by_replica, settled

from mostly_long import TIMES
from tiny import make_tiny_model

COMPLETION = "/v1/completions"
pytestmark = [needs_redis, pytest.mark.long]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model large enough that computing a prompt takes longer than fetching its blocks."""
    return make_tiny_model(
        tmp_path_factory.mktemp("store") / "m",
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        max_position_embeddings=1024,
    )


@pytest.fixture(scope="module")
def pair(model: Path, redis: RedisServer) -> Iterator[Running]:
    """Two replicas in turn, each with room for little more than one prompt: every prompt evicts the one before."""
    flags = ("--replicas", "2", "--routing", "round-robin", "--kv-tokens", "1024", "--kv-store", redis.url)
    with running(model, *flags, "--log-level", "error") as found:
        yield found


def ask(server: Running, number: int, length: int = 600, **more: Any) -> Any:
    prompt = [10 + (number * 31 + i * i) % 300 for i in range(length)]
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    reply = server.post(COMPLETION, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def tokens_of(reply: Any) -> list[int]:
    found: list[int] = reply["choices"][0]["token_ids"]
    return found


def test_an_evicted_prompt_comes_back_at_any_replica_with_the_same_answer(pair: Running, redis: RedisServer) -> None:
    first = [ask(pair, number) for number in range(6)]
    pair.wait_until(lambda: redis.keys() >= 37)
    before = by_replica(pair, "kv_blocks_received_total")
    again = [ask(pair, number) for number in (1, 0, 3, 2)]  # each at the other replica than before
    assert [tokens_of(each) for each in again] == [tokens_of(first[number]) for number in (1, 0, 3, 2)]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in again]
    assert sum(count >= 576 for count in cached) >= 2, cached
    after = by_replica(pair, "kv_blocks_received_total")
    assert min(after[replica] - before[replica] for replica in after) >= 0 and sum(after.values()) > sum(
        before.values()
    )
    settled(pair)


def test_a_tenant_does_not_find_the_blocks_of_another(pair: Running, redis: RedisServer) -> None:
    ask(pair, 40, cache_salt="mine")
    for number in range(41, 45):
        ask(pair, number)
    settled(pair)
    other = [ask(pair, 40, cache_salt="yours"), ask(pair, 40, cache_salt="theirs")]
    assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in other] == [0, 0]


@pytest.mark.long
def test_clients_do_not_notice_that_the_store_is_killed(pair: Running, redis: RedisServer) -> None:
    expected = {number: tokens_of(ask(pair, number)) for number in range(8)}
    for _ in range(TIMES):
        with ThreadPoolExecutor(4) as threads:
            answers = [(number % 8, threads.submit(ask, pair, number % 8)) for number in range(24)]
            time.sleep(0.3)
            redis.kill()
            assert all(tokens_of(each.result()) == expected[number] for number, each in answers)
        assert tokens_of(ask(pair, 3)) == expected[3], "without a store"
        redis.start()
        settled(pair)
    time.sleep(1.1)  # the store is tried again after a second
    for number in range(8):
        ask(pair, number)
    pair.wait_until(lambda: redis.keys() > 0)


def test_a_store_that_hangs_costs_less_than_computing(pair: Running, redis: RedisServer) -> None:
    expected = [tokens_of(ask(pair, number)) for number in range(4)]
    redis.hang()
    try:
        begun = time.monotonic()
        assert [tokens_of(ask(pair, number)) for number in range(4)] == expected
        assert time.monotonic() - begun < 20
    finally:
        redis.go_on()


@pytest.mark.long
def test_a_damaged_block_is_computed_again(model: Path, tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    try:
        flags = ("--kv-tokens", "1024", "--kv-store", redis.url, "--log-level", "warning")
        with running(model, *flags) as server:
            expected = [tokens_of(ask(server, number)) for number in range(3)]
            server.wait_until(lambda: redis.keys() >= 40)
            script = (
                b"for _, key in ipairs(redis.call('keys', '*')) do redis.call('setrange', key, 100, 'damaged') end "
                b"return redis.status_reply('done')"
            )
            redis.call(b"EVAL", script, b"0")
            assert [tokens_of(ask(server, number)) for number in range(3)] == expected
            assert "is damaged" in server.logged()
    finally:
        redis.kill()


def test_a_wrong_url_is_refused_without_its_password(model: Path) -> None:
    from test_roles import refused

    said = refused(model, "--kv-store", "http://:secret@host")
    assert "redis://[:PASSWORD@]HOST" in said and "secret" not in said
