"""Several engines behind one server: which gets a request, what is seen when one dies, and what they count together."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from running import Running, keys_file, running
from test_chaos import Client, asks, ended_well

from mostly_long import TIMES, mostly_long
from tiny import make_tiny_model

COMPLETION = "/v1/completions"
ENDS = ("finished", "aborted", "rejected", "failed")


def by_replica(server: Running, name: str) -> dict[str, float]:
    """The value of each replica's series, added up over models."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name == f"chairlift:{name}":
                replica = sample.labels["replica"]
                found[replica] = found.get(replica, 0.0) + sample.value
    return found


def settled(server: Running) -> dict[str, float]:
    """The counts of all replicas together once nothing runs, proven to add up for each of them."""
    server.wait_until(
        lambda: (
            not any(
                {**by_replica(server, "num_requests_running"), **by_replica(server, "num_requests_waiting")}.values()
            )
        )
    )

    def add_up() -> bool:
        counts = {name: by_replica(server, f"requests_{name}_total") for name in ("submitted", *ENDS)}
        return all(
            counts["submitted"][replica] == sum(counts[end][replica] for end in ENDS) for replica in counts["submitted"]
        )

    server.wait_until(add_up)
    assert not any(by_replica(server, "kv_cache_usage_perc").values()), "a block has leaked"
    return {name: sum(by_replica(server, f"requests_{name}_total").values()) for name in ("submitted", *ENDS)}


def engine_pids(server: Running) -> list[int]:
    return server._children(("engine_process", "fake_engine"))


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[Running]:
    with running(tiny_model, "--replicas", "2", "--kv-tokens", "8192", "--log-level", "error") as found:
        yield found


@pytest.mark.parametrize("kind", mostly_long(["fakes", "pair"]))
def test_a_conversation_goes_to_the_replica_that_has_its_prefix_and_answers_are_the_same(
    request: pytest.FixtureRequest, kind: str
) -> None:
    pair: Running = request.getfixturevalue(kind)
    prompts = [[10 + chat] * 100 for chat in range(6)]
    first = [ask(pair, prompt) for prompt in prompts]
    for turn in range(1, 4):
        for chat, prompt in enumerate(prompts):
            prompt += [20 + turn] * 50
            reply = ask(pair, prompt)
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= len(prompt) - 50 - 16, "it went to the other replica"
            assert (
                reply["choices"][0]["token_ids"]
                == ask(pair, prompt, cache_salt=f"own-{turn}-{chat}")["choices"][0]["token_ids"]
            )
    assert len(first) == 6 and min(by_replica(pair, "requests_finished_total").values()) >= 6, "both were used"
    settled(pair)


def ask(server: Running, prompt: list[int], **more: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    reply = server.post(COMPLETION, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(("kind", "tokens"), mostly_long([("fakes", 80), ("pair", 400)]))
def test_the_state_of_a_request_and_all_caches_are_reached_wherever_they_are(
    request: pytest.FixtureRequest, kind: str, tokens: int
) -> None:
    pair: Running = request.getfixturevalue(kind)
    ask(pair, [7] * 200)
    ask(pair, [8] * 200)
    assert pair.post("/reset_prefix_cache").json()["blocks"] >= 2 * (200 // 16)
    health = pair.get("/health").json()
    assert health["status"] == "ok" and list(health["replicas"].values()) == [{"0": "ok", "1": "ok"}]
    with ThreadPoolExecutor(4) as threads:
        long = [
            threads.submit(
                pair.post,
                COMPLETION,
                {"prompt": [9], "max_tokens": tokens, "ignore_eos": True, "request_id": f"long-{n}"},
            )
            for n in range(4)
        ]
        seen = set()
        while not all(each.done() for each in long):
            seen |= {n for n in range(4) if pair.get(f"/v1/requests/long-{n}").status_code == 200}
    assert seen == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def absent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file: while it exists, no fake engine starts."""
    return tmp_path_factory.mktemp("absent") / "absent"


@pytest.fixture(scope="module")
def fakes(tiny_model: Path, absent: Path) -> Iterator[Running]:
    """Two replicas of 12 rows with engines that only pretend."""
    environment = {"FAKE_STEP": "0.02", "FAKE_SEQUENCES": "12", "FAKE_ABSENT": str(absent)}
    flags = ("--replicas", "2", "--log-level", "error")
    with running(tiny_model, *flags, fake=True, environment=environment) as server:
        yield server
        settled(server)


@pytest.mark.long
def test_a_killed_replica_costs_only_the_requests_that_had_a_token(fakes: Running) -> None:
    """12 rows a replica and 48 requests: half of them wait without a token when one of the two is killed."""
    before = sum(by_replica(fakes, "engine_restarts_total").values())
    for number in range(TIMES):
        moved = sum(by_replica(fakes, "requests_moved_total").values())
        answers = asyncio.run(kill_one_under_load(fakes, engine_pids(fakes)[number % 2]))
        ends = [ended_well(answer, stream=True) for answer in answers]
        assert all(b"200" in answer.partition(b"\r\n")[0] for answer in answers), "an error before the stream began"
        broken = [answer for answer, end in zip(answers, ends, strict=True) if end == "error"]
        assert 1 <= len(broken) <= 12, "only a batch of them had a token from the engine that was killed"
        assert all(b'"text"' in answer for answer in broken), "a request without a token was not sent to the other"
        assert sum(by_replica(fakes, "requests_moved_total").values()) - moved >= 6
        fakes.wait_until(lambda: up_replicas(fakes) == ["0", "1"], 60)
        settled(fakes)
    assert sum(by_replica(fakes, "engine_restarts_total").values()) - before == TIMES


def up_replicas(server: Running) -> list[str]:
    return [replica for replica, up in by_replica(server, "engine_up").items() if up]


async def kill_one_under_load(server: Running, pid: int) -> list[bytes]:
    clients = [Client(server) for _ in range(48)]
    for client in clients:
        await client.send({"prompt": "Hello", "max_tokens": 150, "ignore_eos": True, "stream": True}, path=COMPLETION)
    running_rows = 0.0
    while running_rows < 24:
        await asyncio.sleep(0.02)
        running_rows = sum(by_replica(server, "num_requests_running").values())
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return list(await asyncio.gather(*(client.read_all() for client in clients)))


def test_the_server_is_healthy_while_one_replica_works_and_unhealthy_without_any(fakes: Running, absent: Path) -> None:
    absent.touch()
    first, second = engine_pids(fakes)
    os.kill(first, signal.SIGKILL)
    fakes.wait_until(lambda: len(up_replicas(fakes)) == 1)
    assert fakes.is_healthy()
    assert fakes.post(COMPLETION, {"prompt": "Hello", "max_tokens": 3}).status_code == 200
    os.kill(second, signal.SIGKILL)
    fakes.wait_until(lambda: not fakes.is_healthy())
    refused = fakes.post(COMPLETION, {"prompt": "Hello", "max_tokens": 3})
    assert refused.status_code == 503 and refused.headers["Retry-After"]
    absent.unlink()
    fakes.wait_until(lambda: len(up_replicas(fakes)) == 2, 60)
    assert fakes.post(COMPLETION, {"prompt": "Hello", "max_tokens": 3}).status_code == 200


@pytest.mark.long
def test_a_replica_that_hangs_gets_no_request_and_its_waiting_ones_move(tiny_model: Path) -> None:
    with running(tiny_model, "--replicas", "2", "--log-level", "error", fake=True) as server:
        stopped = engine_pids(server)[0]
        os.kill(stopped, signal.SIGSTOP)
        with ThreadPoolExecutor(8) as threads:  # some are sent to it before it counts as stuck
            body = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
            replies = list(threads.map(lambda _: server.post(COMPLETION, body), range(8)))
        assert [reply.status_code for reply in replies] == [200] * 8
        assert sum(by_replica(server, "requests_moved_total").values()) >= 1
        assert server.is_healthy()
        server.wait_until(lambda: len(up_replicas(server)) == 2, 60)
        settled(server)


def test_cancelled_requests_are_cancelled_at_their_replica(fakes: Running) -> None:
    before = by_replica(fakes, "requests_aborted_total")

    async def leave() -> None:
        clients = [Client(fakes) for _ in range(8)]
        for client in clients:
            await client.send(asks(400, stream=True))
        while sum(by_replica(fakes, "num_requests_running").values()) < 8:
            await asyncio.sleep(0.01)
        for client in clients:
            client.vanish()

    asyncio.run(leave())
    settled(fakes)
    after = by_replica(fakes, "requests_aborted_total")
    aborted = [after[replica] - before[replica] for replica in after]
    assert sum(aborted) == 8 and min(aborted) > 0


@pytest.mark.long
def test_429_comes_only_when_all_replicas_together_are_full(tiny_model: Path) -> None:
    """Two replicas of two rows and six places in the queue, in two HTTP processes: ten fit, whoever accepts them."""
    environment = {"FAKE_STEP": "0.3", "FAKE_SEQUENCES": "2"}
    flags = ("--replicas", "2", "--api-workers", "2", "--max-waiting", "6", "--log-level", "error")
    with running(tiny_model, *flags, fake=True, environment=environment) as server, ExitStack() as streams:
        body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}

        client = streams.enter_context(httpx.Client(timeout=60))

        def begin() -> httpx.Response:
            return streams.enter_context(client.stream("POST", server.url + COMPLETION, json=body))

        replies, begun = [], []
        for _ in range(4):
            replies.append(begin())
            begun.append(replies[-1].iter_raw())  # one that is dropped closes its stream
            next(begun[-1])  # it has its first token
        replies += [begin() for _ in range(6)]
        assert [reply.status_code for reply in replies] == [200] * 10
        for _ in range(4):
            refused = server.post(COMPLETION, {**body, "stream": False})
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
            assert 1 <= int(refused.headers["Retry-After"]) <= 60


@pytest.mark.long
def test_a_tenant_s_limits_hold_across_two_http_processes_and_two_replicas(tiny_model: Path, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, bob="max_concurrent = 3", carol="tokens_per_minute = 60")
    flags = ("--replicas", "2", "--api-workers", "2", "--api-keys", keys, "--log-level", "error")
    with running(tiny_model, *flags, fake=True, environment={"FAKE_STEP": "0.05"}) as server:
        server.key = "sk-key-of-operator"
        body = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True}

        def post(key: str) -> int:
            headers = {"Authorization": f"Bearer sk-key-of-{key}"}
            return server.post(COMPLETION, body, headers=headers).status_code

        with ThreadPoolExecutor(12) as threads:
            codes = list(threads.map(post, ["bob"] * 12))
        assert codes.count(200) == 3 and codes.count(429) == 9
        codes = [post("carol") for _ in range(6)]
        assert codes[0] == 200 and codes.count(200) <= 2, "its tokens were counted in one process only"
        assert settled(server)["finished"] == codes.count(200) + 3


# ---- several models


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    other = make_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=5, max_position_embeddings=256)
    flags = ("--model", f"one={tiny_model}", "--model", f"org/two={other}", "--kv-tokens", "4096")
    with running(*flags, "--log-level", "error") as found:
        yield found


@pytest.mark.long
def test_each_model_answers_under_its_name_with_its_own_weights(models: Running) -> None:
    client = OpenAI(base_url=f"{models.url}/v1", api_key="none", max_retries=0)
    assert [(each.id, each.model_extra["max_model_len"]) for each in client.models.list().data] == [
        ("one", 512),
        ("org/two", 256),
    ]
    assert client.models.retrieve("org/two").id == "org/two"

    def say(model: str) -> str | None:
        messages: Any = [{"role": "user", "content": "What is the answer?"}]
        reply = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=12)
        assert reply.model == model
        return reply.choices[0].message.content

    assert say("one") != say("org/two")
    streamed = client.completions.create(model="org/two", prompt="The", max_tokens=5, stream=True)
    assert {chunk.model for chunk in streamed} == {"org/two"}
    with pytest.raises(NotFoundError, match="no model 'three' here: use one of 'one', 'org/two'"):
        say("three")
    unnamed = models.post(COMPLETION, {"prompt": "The", "max_tokens": 2})
    assert unnamed.json()["model"] == "one", "the first serves requests that name none"


@pytest.mark.long
def test_each_model_has_limits_tokenizer_routes_and_metrics_of_its_own(models: Running) -> None:
    long = {"prompt": [5] * 300, "max_tokens": 2}
    assert models.post(COMPLETION, {**long, "model": "one"}).status_code == 200
    refused = models.post(COMPLETION, {**long, "model": "org/two"})
    assert refused.status_code == 400 and "256 tokens" in refused.json()["error"]["message"]
    for name, length in (("one", 512), ("org/two", 256)):
        assert models.post(COMPLETION, {"prompt": [5], "max_tokens": 2, "model": name}).status_code == 200
        assert models.get(f"/tokenizer_info?model={name}").json()["model_max_length"] == length
        tokens = models.post("/tokenize", {"model": name, "prompt": "Hello"}).json()
        assert tokens["max_model_len"] == length
        assert models.metric("requests_submitted_total", model_name=name, replica="0") >= 1
        assert models.metric("engine_up", model_name=name) == 1


def test_names_that_clash_or_do_not_fit_are_refused_before_anything_is_loaded(tiny_model: Path) -> None:
    from typer.testing import CliRunner

    from chairlift import cli

    def error(*flags: str) -> str:
        return str(CliRunner().invoke(cli.app, ["serve", *flags]).exception)

    assert "two models have the name 'a'" in error("--model", f"a={tiny_model}", "--model", "a=other")
    twice = error("--model", f"a={tiny_model}", "--model", "b=c", "--served-model-name", "x")
    assert "--served-model-name names one model" in twice
    assert "give one of them" in error(str(tiny_model), "--model", f"a={tiny_model}")


@pytest.mark.long
def test_models_that_do_not_fit_together_are_refused_with_their_sizes(tiny_model: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "chairlift", "serve", str(tiny_model), "--port", "0", "--replicas", "2"]
    done = subprocess.run([*command, "--kv-tokens", "40000000"], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "MiB are free for it" in done.stderr and "of 2 that share it" in done.stderr
