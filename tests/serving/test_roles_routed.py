"""Servers of different roles behind a router: one computes prompts, another decodes, with KV sent over TCP."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from running import Running, routed, running
from test_roles import COMPLETION, FLAGS, ask, body_of, refused

from chairlift.serving.sending import PROOF, SEND_TO, proof_of

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "cluster.key"
    file.write_text(secrets.token_hex(32))
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def servers(tiny_model: Path, key: Path) -> Iterator[tuple[Running, Running, Running]]:
    """A server for prompts, one that decodes, and the router in front of both."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = ("--cluster-key", str(key), *FLAGS)
    with ThreadPoolExecutor(2) as threads:
        begun = [
            running(tiny_model, "--role", "prefill", *common),
            running(tiny_model, "--role", "decode", "--kv-listen", f"127.0.0.1:{port}", *common),
        ]
        prefill, decode = threads.map(lambda each: each.__enter__(), begun)
        try:
            with routed(prefill, decode, flags=("--cluster-key", str(key), "--log-level", "error")) as router:
                yield prefill, decode, router
        finally:
            for each in begun:
                each.__exit__(None, None, None)


def test_a_prompt_is_computed_by_one_server_and_decoded_by_the_other(
    servers: tuple[Running, Running, Running],
) -> None:
    prefill, decode, router = servers
    before = decode.metric("kv_blocks_received_total")
    alone = ask(prefill, 400, 5, cache_salt="alone", max_tokens=20)
    found = ask(router, 400, 5, max_tokens=20)
    assert found["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    decode.wait_until(lambda: decode.metric("kv_blocks_received_total") - before == 25)
    assert prefill.metric("kv_blocks_sent_total") >= 25
    messages = [{"role": "user", "content": "the question is what the answer was " * 10}]
    reply = router.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "stream": True})
    assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
    decode.wait_until(lambda: decode.metric("kv_blocks_received_total") - before > 25)
    assert prefill.is_idle() and decode.is_idle()


def test_a_client_cannot_have_prompts_sent_anywhere(servers: tuple[Running, Running, Running], key: Path) -> None:
    prefill, _, router = servers
    address = "tcp:127.0.0.1:9"
    for proof in ("", "00", proof_of(b"another key of the cluster", address)):
        reply = prefill.post(COMPLETION, body_of(100, 1), headers={SEND_TO: address, PROOF: proof})
        assert reply.status_code == 403 and reply.json()["error"]["code"] == "wrong_cluster_key"
    right = {SEND_TO: address, PROOF: proof_of(key.read_bytes(), address)}
    reply = prefill.post(COMPLETION, body_of(100, 1), headers=right)
    assert reply.json() == {"sent": True}, "nothing listens there: the engine that decodes it computes it"
    assert router.post(COMPLETION, body_of(100, 1), headers=right).json()["choices"], "the router drops the header"


@pytest.mark.long
@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_a_killed_engine_of_either_server_is_not_noticed_by_requests_without_a_token(
    servers: tuple[Running, Running, Running], which: int
) -> None:
    *both, router = servers
    expected = [ask(router, 300 + number, number)["choices"][0]["token_ids"] for number in range(12)]

    async def go() -> list[list[int]]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(12) as threads:
            asked = [
                loop.run_in_executor(threads, lambda n=n: ask(router, 300 + n, n, cache_salt=f"{which}"))
                for n in range(12)
            ]
            await asyncio.sleep(0.1)
            os.kill(both[which].engine_pid(), signal.SIGKILL)
            return [reply["choices"][0]["token_ids"] for reply in await asyncio.gather(*asked)]

    assert asyncio.run(go()) == expected
    both[which].wait_until(both[which].is_healthy, 60)
    router.wait_until(lambda: router.get("/health").json()["status"] == "ok", 20)
    for server in both:
        server.wait_until(server.is_idle)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--role", "prefill"), "same --cluster-key"),
        (("--role", "decode", "--cluster-key", "KEY"), "needs --kv-listen"),
        (("--kv-listen", "127.0.0.1:9"), "needs --kv-listen HOST:PORT, and only it does"),
        (("--role", "decode", "--cluster-key", "KEY", "--kv-listen", "127.0.0.1:9", "--replicas", "2"), "one engine"),
        (("--role", "prefill", "--cluster-key", "/none"), "cannot be read"),
    ],
)
def test_a_role_without_what_it_needs_is_refused(
    tiny_model: Path, key: Path, flags: tuple[str, ...], message: str
) -> None:
    assert message in refused(tiny_model, *(flag.replace("KEY", str(key)) for flag in flags))
