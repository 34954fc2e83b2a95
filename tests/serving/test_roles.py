"""Prompts and answers in different engines of one server: the same answers, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Running, running
from test_chaos import Client, ended_well
from test_replicas import by_replica, engine_pids, settled

from chairlift.routing.pools import LOCAL_TOKENS
from mostly_long import TIMES
from tiny import make_tiny_model

COMPLETION = "/v1/completions"
FLAGS = ("--kv-tokens", "8192", "--log-level", "error")

pytestmark = pytest.mark.long


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


def body_of(length: int, number: int) -> dict[str, Any]:
    prompt = [10 + (number * 7 + i * i) % 300 for i in range(length)]
    return {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def ask(server: Running, length: int, number: int = 0, **more: Any) -> Any:
    reply = server.post(COMPLETION, {**body_of(length, number), **more})
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


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 3},
        {"n": 3, "temperature": 0.8, "seed": 5},
        {"best_of": 3, "use_beam_search": True, "temperature": 0},
        {"stop": ["e", "a", "o"], "max_tokens": 40},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 1, "max_tokens": 2},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "temperature": 0.7, "seed": 9},
        {"structured_outputs": {"regex": "[a-z]{3,9}"}, "ignore_eos": False},
        {"cache_salt": "own"},
    ],
    ids=lambda more: "-".join(more),
)
def test_every_way_to_ask_gets_the_same_answer(one: Running, apart: Running, more: dict[str, Any]) -> None:
    found, expected = (ask(server, 150, 77, **more) for server in (apart, one))
    assert scrubbed(found["choices"]) == scrubbed(expected["choices"])
    again = ask(apart, 150, 77, **more)
    assert scrubbed(again["choices"]) == scrubbed(expected["choices"]), "with all blocks cached"
    settled(apart)


def scrubbed(found: Any) -> Any:
    """Without the digits of numbers that may differ by rounding: a prompt's slices are not the same."""
    if isinstance(found, dict):
        return {name: scrubbed(value) for name, value in found.items()}
    if isinstance(found, list):
        return [scrubbed(value) for value in found]
    return round(found, 3) + 0.0 if isinstance(found, float) else found


def test_a_stream_has_the_same_tokens(one: Running, apart: Running) -> None:
    expected = ask(one, 200, 3, max_tokens=20)["choices"][0]["token_ids"]
    reply = apart.post(COMPLETION, {**body_of(200, 3), "max_tokens": 20, "stream": True})
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert [token for chunk in chunks for each in chunk["choices"] for token in each["token_ids"]] == expected


def test_a_short_prompt_and_one_that_is_cached_where_it_is_decoded_go_there_at_once(apart: Running) -> None:
    ask(apart, 330, 50)
    before = by_replica(apart, "requests_submitted_total")
    ask(apart, LOCAL_TOKENS, 51)
    reply = ask(apart, 330, 50)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 320
    settled(apart)
    after = by_replica(apart, "requests_submitted_total")
    assert (after["0"] - before["0"], after["1"] - before["1"]) == (0, 2)


def test_a_prompt_that_is_cached_where_prompts_are_computed_is_a_prefix_hit(apart: Running) -> None:
    first = ask(apart, 300, 60)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = ask(apart, 300, 60)  # so many tokens behind the last block that routing knows: it is computed there again
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 288
    assert again["choices"] == first["choices"]


@pytest.mark.long
def test_a_prompt_that_leaves_is_aborted_where_it_is_computed(tiny_model: Path) -> None:
    """The decoder's pool is small, and answers are preempted; clients leave at any moment; all counts add up."""
    flags = ("--role", "prefill=1,decode=1", "--kv-tokens", "1024", "--step-tokens", "64", "--max-sequences", "8")
    with running(tiny_model, *flags, "--log-level", "error") as server:
        expected = [ask(server, 200 + seed, seed, max_tokens=100)["choices"][0]["token_ids"] for seed in range(8)]

        async def crowd() -> list[bytes]:
            clients = [Client(server) for _ in range(24)]
            for number, client in enumerate(clients):
                await client.send({**body_of(200 + number % 8, number % 8), "max_tokens": 100}, path=COMPLETION)
                if number >= 8:
                    await asyncio.sleep(0.01 * (number % 5))
                    client.vanish()
            return list(await asyncio.gather(*(client.read_all() for client in clients[:8])))

        answers = asyncio.run(crowd())
        found = [json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["token_ids"] for answer in answers]
        assert found == expected
        assert settled(server)["aborted"] >= 1
        assert sum(by_replica(server, "num_preemptions_total").values()) >= 1, "the pool was never short"


@pytest.mark.long
def test_blocks_of_8_bits_travel_with_their_scales(tiny_model: Path) -> None:
    flags = ("--kv-dtype", "int8", *FLAGS)
    with running(tiny_model, *flags) as one, running(tiny_model, "--role", "prefill=1,decode=1", *flags) as apart:
        for number in range(4):
            answers = [ask(server, 150 + number, number, max_tokens=20) for server in (one, apart)]
            assert answers[0]["choices"] == answers[1]["choices"]
        assert by_replica(apart, "kv_blocks_received_total")["1"] >= 4 * 9


@pytest.fixture(scope="module")
def three(tiny_model: Path) -> Iterator[Running]:
    """One engine for prompts, and two for answers."""
    with running(tiny_model, "--role", "prefill=1,decode=2", *FLAGS) as found:
        yield found


@pytest.mark.long
@pytest.mark.parametrize("place", [0, 1], ids=["prefill", "decode"])
def test_a_killed_engine_costs_only_answers_that_had_begun_there(
    one: Running, three: Running, place: int, record_property: pytest.RecordProperty
) -> None:
    expected = [ask(one, 150 + seed, seed, max_tokens=200)["choices"][0]["token_ids"] for seed in range(16)]
    seen = Counter[str]()  # how the answers ended
    for number in range(TIMES):
        answers = asyncio.run(kill_under_load(three, place, number))
        for seed, answer in enumerate(answers):
            end = ended_well(answer, stream=True)
            assert b"200" in answer.partition(b"\r\n")[0], "an error before the stream began"
            tokens = [
                token
                for line in answer.decode().splitlines()
                if line.startswith("data: {") and "choices" in line
                for token in json.loads(line[6:])["choices"][0].get("token_ids") or ()
            ]
            assert tokens == expected[seed % 16][: len(tokens)], "a wrong token"
            assert end == "error" or len(tokens) == 200
            assert end != "error" or tokens, "a request without a token was not computed elsewhere"
            seen[end] += 1
        assert place == 1 or seen["error"] == 0, "a prompt's engine has no client's token"
        three.wait_until(lambda: all(by_replica(three, "engine_up").values()), 60)
        settled(three)
    record_property("clients saw", dict(seen))


async def kill_under_load(server: Running, place: int, number: int) -> list[bytes]:
    clients = [Client(server) for _ in range(32)]
    for seed, client in enumerate(clients):
        body = {**body_of(150 + seed % 16, seed % 16), "max_tokens": 200, "stream": True}
        await client.send({**body, "cache_salt": f"{number}.{seed}"}, path=COMPLETION)
    deadline = time.monotonic() + 1  # a quiet machine may have computed all prompts before they are seen
    while by_replica(server, "num_requests_running")[str(place)] < 1 and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.02 * (number % 10) * place)
    os.kill(engine_at(server, place), signal.SIGKILL)
    return list(await asyncio.gather(*(client.read_all() for client in clients)))


def engine_at(server: Running, place: int) -> int:
    """The process of an engine, by its place in the server."""
    return next(pid for pid in engine_pids(server) if f'"place":{place},' in Path(f"/proc/{pid}/cmdline").read_text())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--role", "prefill=1"), "some engine must decode"),
        (("--role", "decode=0,prefill=1"), "use prefill, decode or both"),
        (("--role", "prefill=1,decode=1", "--replicas", "3"), "--replicas is 3"),
        (("--role", "prefill=1,decode=1", "--no-prefix-cache"), "need the prefix cache"),
    ],
)
def test_roles_that_cannot_be_are_refused_with_advice(tiny_model: Path, flags: tuple[str, ...], message: str) -> None:
    assert message in refused(tiny_model, *flags)


@pytest.mark.long
def test_layers_with_a_window_are_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", "MistralForCausalLM", sliding_window=32)
    said = refused(model, "--role", "prefill=1,decode=1")
    assert "sliding window" in said, said


def refused(model: Path, *flags: str) -> str:
    """What the server says when it does not start."""
    command = [sys.executable, "-m", "chairlift", "serve", str(model), "--port", "0", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    return " ".join(ended.stderr.split())
