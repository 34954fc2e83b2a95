"""Which clients may use a server and how much of it, how it is reached, and how it ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from running import Running, keys_file, running

from chairlift.serving.routes import ROUTES, Access
from processes import standing_still

COMPLETION = "/v1/completions"
LONG = {"prompt": "Hello", "max_tokens": 400}
ONE = {"prompt": "Hello", "max_tokens": 1}


@pytest.fixture(scope="module")
def keyed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with keys and tenants; the tests' own requests carry the operator's key."""
    keys = keys_file(
        tmp_path_factory.mktemp("keys"),
        alice="max_priority = 2",
        bob="max_concurrent = 2",
        carol="tokens_per_minute = 20",
    )
    flags = ("--api-keys", keys, "--served-model-name", "tiny", "--metrics-compat", "vllm")
    with running(tiny_model, *flags, fake=True, environment={"FAKE_STEP": "0.01"}) as started:
        started.key = "sk-key-of-operator"
        yield started
        started.wait_until(started.is_idle)


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Running]:
    """Two seats, two places in the queue, and slow steps."""
    environment = {"FAKE_SEQUENCES": "2", "FAKE_STEP": "0.05"}
    flags = ("--max-waiting", "2", "--cors-origin", "https://example.org", "--cors-origin", "https://other.example")
    with running(tiny_model, *flags, fake=True, environment=environment) as started:
        yield started
        started.wait_until(started.is_idle)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def streaming(server: Running, headers: dict[str, str] | None = None, **body: Any) -> Iterator[Iterator[Any]]:
    """A stream that has begun: the chunks that follow its first."""
    asked = {**LONG, "stream": True, **body}
    with httpx.stream("POST", server.url + COMPLETION, json=asked, headers=headers, timeout=60, verify=False) as reply:
        assert reply.status_code == 200
        lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        next(lines)
        yield lines


# ---- keys


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_each_route_is_open_to_exactly_those_it_is_for(keyed: Running, route: Any) -> None:
    def status(headers: dict[str, str]) -> int:
        response = keyed.request(route.method, route.path.replace("{name:path}", "tiny"), headers=headers)
        if response.status_code in (401, 403):
            wanted = {"message", "type"} if "messages" in route.path else {"message", "type", "param", "code"}
            assert response.json()["error"].keys() == wanted
            assert "sk-" not in response.text
        return response.status_code

    strangers = [{}, bearer("sk-nobody-0001"), {"Authorization": "sk-key-of-alice"}]
    strangers += [{"Authorization": "Basic c2s6c2s="}, {"x-api-key": "sk-nobody-0001"}]
    strangers += [{"x-api-key": "Bearer sk-key-of-alice"}]
    by_strangers = {status(headers) for headers in strangers}
    by_alice, by_operator = status(bearer("sk-key-of-alice")), status(bearer("sk-key-of-operator"))
    if route.access is Access.OPEN:
        assert by_strangers == {by_alice} == {by_operator} == {200}
        return
    assert by_strangers == {401}
    assert by_operator not in (401, 403)
    assert by_alice == (403 if route.access is Access.ADMIN else by_operator)
    assert status({"x-api-key": "sk-key-of-alice"}) == by_alice  # as Anthropic's clients send it


def test_a_refusal_tells_nothing_about_the_key(keyed: Running) -> None:
    wrong = ["sk-nobody-0001", "sk-alice-000", "sk-key-of-alice1", "SK-ALICE-0001", "x" * 5000]
    replies = [keyed.get("/v1/models", headers=bearer(key)) for key in wrong]
    replies.append(keyed.get("/v1/models", headers={}))
    assert {reply.status_code for reply in replies} == {401}
    assert len({reply.text for reply in replies}) == 1
    assert all(reply.headers["www-authenticate"] == "Bearer" for reply in replies)


def test_a_tenant_has_as_many_requests_at_once_as_it_may(keyed: Running) -> None:
    bob = bearer("sk-key-of-bob")
    with streaming(keyed, bob), streaming(keyed, bob):
        refused = keyed.post(COMPLETION, ONE, headers=bob)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        assert refused.json()["error"]["code"] == "tenant_limit"
        assert keyed.post(COMPLETION, ONE, headers=bearer("sk-key-of-alice")).status_code == 200
    keyed.wait_until(lambda: keyed.post(COMPLETION, ONE, headers=bob).status_code == 200)


def test_a_call_with_more_prompts_than_its_tenant_may_ever_have_at_once_is_told_so(keyed: Running) -> None:
    bob = bearer("sk-key-of-bob")
    assert keyed.post(COMPLETION, {**ONE, "prompt": ["a", "b"]}, headers=bob).status_code == 200
    refused = keyed.post(COMPLETION, {**ONE, "prompt": ["a", "b", "c"]}, headers=bob)
    assert refused.status_code == 400  # to come again would be no use
    assert "retry-after" not in refused.headers
    assert "send 2 or fewer" in refused.json()["error"]["message"]


def test_a_tenant_that_has_used_its_minute_s_tokens_waits(keyed: Running) -> None:
    carol = bearer("sk-key-of-carol")
    assert keyed.post(COMPLETION, {**ONE, "max_tokens": 60}, headers=carol).status_code == 200
    refused = keyed.post(COMPLETION, ONE, headers=carol)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "tenant_rate"
    assert 60 < int(refused.headers["retry-after"]) <= 150  # 60 tokens and a prompt, of which 20 were free


def test_a_tenant_s_priority_is_bounded_and_an_operator_s_is_not(keyed: Running) -> None:
    alice = bearer("sk-key-of-alice")
    assert keyed.post(COMPLETION, {**ONE, "priority": 2}, headers=alice).status_code == 200
    assert keyed.post(COMPLETION, {**ONE, "priority": -5}, headers=alice).status_code == 200
    refused = keyed.post(COMPLETION, {**ONE, "priority": 3}, headers=alice)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
    assert keyed.post(COMPLETION, {**ONE, "priority": 1000}).status_code == 200


def test_metrics_are_also_shown_under_vllm_s_names_when_asked(keyed: Running, small: Running) -> None:
    assert keyed.post(COMPLETION, ONE).status_code == 200
    page = keyed.get("/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"}' in page
    assert "vllm:time_to_first_token_seconds_bucket" in page
    assert "vllm:" not in small.get("/metrics").text


def test_one_key_on_the_command_line_opens_every_route_and_is_passed_on_to_no_process(tiny_model: Path) -> None:
    key = "sk-of-the-command-line"
    with running(tiny_model, "--api-key", key, "--api-workers", "2", fake=True) as server:
        assert server.get("/v1/models").status_code == 401
        server.key = key
        assert server.post(COMPLETION, ONE).status_code == 200
        assert server.get("/metrics").status_code == 200
        for child in (server.child("http_process"), server.engine_pid()):
            assert key not in Path(f"/proc/{child}/cmdline").read_text()


# ---- the queue


def test_a_full_queue_refuses_with_429_and_says_when_to_come_again(small: Running) -> None:
    with streaming(small), streaming(small), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(small.post, COMPLETION, {**ONE, "timeout": 1.5}) for _ in range(2)]
        small.wait_until(lambda: small.metric("num_requests_waiting") == 2)
        refused = small.post(COMPLETION, ONE)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert "2 requests are waiting and the server's --max-waiting is 2" in error["message"]
        assert {future.result().status_code for future in waiting} == {408}
    assert small.metric("requests_refused_total", reason="queue_full") == 1
    small.wait_until(small.is_idle)
    assert small.post(COMPLETION, ONE).status_code == 200


def test_a_call_with_more_prompts_than_the_queue_holds_is_told_so_and_nothing_of_it_runs(small: Running) -> None:
    before = small.metric("requests_submitted_total")
    refused = small.post(COMPLETION, {**ONE, "prompt": ["a", "b", "c"]})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "too_many_requests")
    assert "send 2 or fewer" in error["message"]
    assert small.metric("requests_submitted_total") == before
    assert len(small.post(COMPLETION, {**ONE, "prompt": ["a", "b"]}).json()["choices"]) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("clients", "flags"),
    [
        pytest.param(100, ("--max-sequences", "4"), id="100 for a batch of 4"),
        pytest.param(500, (), id="500 with default settings", marks=pytest.mark.long),
    ],
)
def test_clients_that_come_at_once_are_queued_and_none_is_refused(
    tiny_model: Path, clients: int, flags: tuple[str, ...]
) -> None:
    async def ask_all(url: str) -> list[str | None]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            asking = (
                client.completions.create(model="tiny", prompt=f"Skier {number}", max_tokens=8, temperature=0)
                for number in range(clients)
            )
            return [reply.choices[0].finish_reason for reply in await asyncio.gather(*asking)]

    with running(tiny_model, "--served-model-name", "tiny", *flags) as server:
        for _ in range(2):  # the second time the server knows how fast its queue empties
            assert len(asyncio.run(ask_all(server.url))) == clients
        for reason in ("queue_full", "long_wait"):
            assert server.metric("requests_refused_total", reason=reason) == 0


@pytest.mark.long
def test_a_wait_that_would_be_too_long_is_refused_by_the_flag_that_bounds_it(tiny_model: Path) -> None:
    environment = {"FAKE_SEQUENCES": "2", "FAKE_STEP": "0.02"}
    with running(tiny_model, "--max-wait", "0.5", fake=True, environment=environment) as server:
        with ThreadPoolExecutor(60) as pool:
            body = {**ONE, "max_tokens": 5}
            replies = list(pool.map(lambda _: server.post(COMPLETION, body), range(300)))
        refused = [reply for reply in replies if reply.status_code == 429]
        assert refused and len(refused) < 300
        assert {reply.status_code for reply in replies} == {200, 429}
        error = refused[-1].json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "long_wait")
        assert "the server's --max-wait is 0.5 s" in error["message"]
        told = {int(reply.headers["retry-after"]) for reply in refused}
        assert len(told) > 1 and max(told) <= 60, "not all at the same time"
        assert server.metric("requests_refused_total", reason="long_wait") == len(refused)


# ---- browsers


def test_pages_of_other_origins_may_not_call_a_server_by_default(keyed: Running) -> None:
    asking = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    preflight = keyed.request("OPTIONS", COMPLETION, headers=asking)
    assert preflight.status_code == 405
    for response in (preflight, keyed.get("/health", headers={"Origin": "https://example.org"})):
        assert not any(name.startswith("access-control") for name in response.headers)


def test_pages_of_named_origins_may_call_it(small: Running) -> None:
    asking = {
        "Origin": "https://example.org",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }
    preflight = small.request("OPTIONS", COMPLETION, headers=asking)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://example.org"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    reply = small.post(COMPLETION, ONE, headers={"Origin": "https://other.example"})
    assert reply.headers["access-control-allow-origin"] == "https://other.example"
    assert reply.headers["vary"] == "Origin"
    refused = small.post(COMPLETION, {}, headers={"Origin": "https://example.org"})
    assert refused.headers["access-control-allow-origin"] == "https://example.org"  # so that the page can read why
    stranger = small.get("/health", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in stranger.headers


# ---- TLS and several processes


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that has signed itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    subprocess.run(["openssl", "req", *kind, *files, *names], check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.long
def test_a_server_with_a_certificate_speaks_https_alone(tiny_model: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    trust = ssl.create_default_context(cafile=str(cert))
    with running(tiny_model, "--tls-cert", str(cert), "--tls-key", str(key), fake=True) as server:
        assert server.url.startswith("https://")
        assert server.post(COMPLETION, ONE, verify=trust).status_code == 200
        with streaming(server, max_tokens=5) as chunks:
            assert list(chunks)[-1] == "[DONE]"
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health", timeout=10)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            server.get("/health")
        assert server.get("/health", verify=trust).status_code == 200


@pytest.mark.long
def test_several_http_processes_serve_one_model_and_sum_their_metrics(tiny_model: Path) -> None:
    with running(tiny_model, "--api-workers", "2", fake=True) as server:
        first, second = server.process.pid, server.child("http_process")
        for other in (first, second):  # while one of them stands still, the other answers
            with standing_still(other):
                assert server.post(COMPLETION, {**ONE, "max_tokens": 4}).status_code == 200
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda _: server.post(COMPLETION, {**ONE, "max_tokens": 4}), range(38)))
        assert {reply.status_code for reply in replies} == {200}
        assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
        server.wait_until(server.is_idle)
        for _ in range(4):  # whichever of them answers, it answers for both
            assert server.metric("http_requests_total", route=COMPLETION, status="200") == 40
            assert server.metric("requests_finished_total") == 40
            assert server.metric("generation_tokens_total") == 4 * 40
            assert server.metric("engine_up") == 1
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in (second, engine))


# ---- the end


def test_sigterm_lets_a_running_stream_finish_and_refuses_new_requests(tiny_model: Path) -> None:
    with running(tiny_model, fake=True, environment={"FAKE_STEP": "0.02"}) as server:
        with streaming(server, max_tokens=50) as chunks:
            server.process.send_signal(signal.SIGTERM)
            server.wait_until(lambda: server.get("/ready").status_code == 503)
            refused = server.post(COMPLETION, ONE)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "service_unavailable_error"
            assert server.is_healthy()  # it still serves what it has: an orchestrator must not kill it for that
            *rest, done = chunks
        assert done == "[DONE]"
        assert json.loads(rest[-1])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(10) == 0


@pytest.mark.long
def test_a_second_sigterm_ends_at_once(tiny_model: Path) -> None:
    with running(tiny_model, fake=True, environment={"FAKE_STEP": "0.05"}) as server:
        engine = server.engine_pid()
        with streaming(server) as chunks:
            server.process.send_signal(signal.SIGTERM)
            server.wait_until(lambda: server.get("/ready").status_code == 503)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(5) == 0  # the stream had 20 s to go
            assert is_cut_off(chunks)
        assert not Path(f"/proc/{engine}").exists()


def is_cut_off(chunks: Iterator[str]) -> bool:
    """Whether a stream ends without an answer's end, in whatever way."""
    try:
        last = [json.loads(chunk) for chunk in chunks if chunk != "[DONE]"][-1]
    except httpx.TransportError:
        return True
    return "error" in last or last["choices"][0]["finish_reason"] is None


@pytest.mark.long
def test_a_stream_that_outlasts_the_grace_is_ended_with_an_error(tiny_model: Path) -> None:
    with running(tiny_model, "--grace", "0.5", fake=True, environment={"FAKE_STEP": "0.05"}) as server:
        with streaming(server) as chunks:
            server.process.send_signal(signal.SIGTERM)
            *_, last, done = chunks
        assert json.loads(last)["error"]["message"] == "the server is stopping"
        assert done == "[DONE]"
        assert server.process.wait(5) == 0
