"""Prompts and answers in different engines of one server: the same answers, whatever happens in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Running, running
from test_replicas import by_replica, settled

COMPLETION = "/v1/completions"
FLAGS = ("--kv-tokens", "8192", "--log-level", "error")


@pytest.fixture(scope="module")
def one(tiny_model: Path) -> Iterator[Running]:
    """A server with one engine that does both."""
    with running(tiny_model, *FLAGS) as found:
        yield found


@pytest.fixture(scope="module")
def apart(tiny_model: Path) -> Iterator[Running]:
    """A server with one engine for prompts, and one for answers."""
    with running(tiny_model, "--role", "prefill=1,decode=1", *FLAGS) as found:
        yield found


def ask(server: Running, length: int, seed: int = 0, **more: Any) -> Any:
    prompt = [10 + (seed * 7 + i * i) % 300 for i in range(length)]
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    reply = server.post(COMPLETION, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("length", [33, 63, 64, 65, 100, 129, 300, 500])
def test_an_answer_is_that_of_one_engine_and_its_prompt_is_computed_elsewhere(
    one: Running, apart: Running, length: int
) -> None:
    before = by_replica(apart, "kv_blocks_received_total")["1"]
    found, expected = ask(apart, length, length), ask(one, length, length)
    assert found["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert found["usage"] == expected["usage"], "what another engine computed is no prefix hit"
    received = by_replica(apart, "kv_blocks_received_total")["1"] - before
    assert received >= length // 16
    settled(apart)
