"""What clients can cause, done to a server on purpose: everything is bounded, and goes back when they are gone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from raw_http import COMPLETION, connected, in_chunks, post, read_all, read_reply
from running import Running, keys_file, running

from mostly_long import mostly_long
from processes import cpu_seconds, megabytes

ONE = {"prompt": "Hello", "max_tokens": 1}
BIG = {"prompt": "Hello", "max_tokens": 400, "n": 20, "logprobs": 64}  # 8 MB: a socket's buffer takes 4 at most


def forget_peak(pid: int) -> float:
    """Begin a new peak of a process's memory; what it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return megabytes(pid, "VmHWM")


def adds_up(server: Running) -> None:
    """Every request that the engine was given has ended in one way, and nothing is left of it."""
    server.wait_until(server.is_idle, 60)


# ---- replies that are not read


@pytest.fixture(scope="module")
def impatient(tiny_model: Path) -> Iterator[Running]:
    """A server that waits three seconds for a client to read on."""
    environment = {"FAKE_STEP": "0.001", "FAKE_SEQUENCES": "768"}
    constants = {"chairlift.serving.listening.STALL_SECONDS": 3.0}
    with running(tiny_model, "--log-level", "error", fake=True, environment=environment, constants=constants) as server:
        yield server
        adds_up(server)


def too_many(server: Running) -> float:
    """The completions that were refused with 429: the log-probabilities under way are bounded, too."""
    found = re.search(r'http_requests_total{[^}]*"/v1/completions",status="429"} (\S+)', server.get("/metrics").text)
    return 0.0 if found is None else float(found.group(1))


@pytest.mark.long
@pytest.mark.parametrize("streams", [2, pytest.param(12, marks=pytest.mark.long)])
def test_streams_that_nobody_reads_are_ended_and_their_memory_is_bounded(impatient: Running, streams: int) -> None:
    server, body = impatient, {**BIG, "n": 64, "stream": True}  # 260 MB of memory each, if all is kept
    before = forget_peak(server.process.pid)
    aborted, refused = server.metric("requests_aborted_total"), too_many(server)
    with ExitStack() as stack:
        for _ in range(streams):
            stack.enter_context(connected(server, buffer=4096)).sendall(post(body))
        server.wait_until(lambda: server.metric("num_requests_running") > 0, 60)
        server.wait_until(server.is_idle, 300)
    aborted, refused = server.metric("requests_aborted_total") - aborted, too_many(server) - refused
    assert aborted + refused == streams and aborted >= 2, "each was ended before its end, or refused with 429"
    assert megabytes(server.process.pid, "VmHWM") - before < min(32 * streams, 256) * 1.5 + 60
    assert server.post(COMPLETION, ONE).status_code == 200


@pytest.mark.long
def test_a_stream_that_is_read_slowly_comes_whole(impatient: Running) -> None:
    server, closed = impatient, impatient.metric("connections_closed_total", reason="unread")
    with connected(server, buffer=1 << 16) as client:
        # 2,500 tokens with 64 log-probabilities each: less than the 32 MiB that may be unread.
        client.sendall(post({**BIG, "n": 5, "stream": True}))
        found = b""
        for _ in range(16):  # slowly, for longer than a client may stall
            time.sleep(0.5)
            found += client.recv(1 << 16)
        while b"data: [DONE]" not in found[-100:]:
            part = client.recv(1 << 20)
            assert part, f"it broke off after {len(found)} bytes: {found[-300:]!r}"
            found += part
    assert found.count(b'"finish_reason":"length"') == 5
    assert server.metric("connections_closed_total", reason="unread") == closed


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_nobody_reads_is_dropped_after_a_while(impatient: Running, stream: bool) -> None:
    server, closed = impatient, impatient.metric("connections_closed_total", reason="unread")
    with connected(server, buffer=4096) as client:
        client.sendall(post({**BIG, "n": 7, "stream": True} if stream else BIG))
        server.wait_until(lambda: server.metric("connections_closed_total", reason="unread") == closed + 1, 60)
        with suppress(ConnectionError):
            assert len(read_all(client)) < 6_000_000, "all of it came"
    adds_up(server)


@pytest.mark.long
def test_a_tenant_s_request_counts_until_its_reply_is_read(tiny_model: Path, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, bob="max_concurrent = 1")
    with running(
        tiny_model, "--api-keys", keys, "--log-level", "error", fake=True, environment={"FAKE_STEP": "0.001"}
    ) as server:
        server.key = "sk-key-of-operator"
        bob = {"Authorization": "Bearer sk-key-of-bob"}
        for _ in range(5):  # one after the other
            assert server.post(COMPLETION, ONE, headers=bob).status_code == 200
        with connected(server, buffer=1 << 16) as client:
            client.sendall(post(BIG, "sk-key-of-bob"))
            server.wait_until(lambda: server.metric("requests_finished_total") == 6, 60)
            refused = server.post(COMPLETION, ONE, headers=bob)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_limit")
            status, _, reply = read_reply(client)
            assert status == 200 and len(json.loads(reply)["choices"]) == BIG["n"]
        server.wait_until(lambda: server.post(COMPLETION, ONE, headers=bob).status_code == 200)


@pytest.mark.long
def test_draining_waits_for_a_reply_that_is_read_slowly(tiny_model: Path) -> None:
    with running(tiny_model, "--log-level", "error", fake=True, environment={"FAKE_STEP": "0.001"}) as server:
        with connected(server, buffer=1 << 16) as client:
            client.sendall(post(BIG))
            server.wait_until(lambda: server.metric("requests_finished_total") == 1, 60)
            server.process.send_signal(signal.SIGTERM)
            server.wait_until(lambda: server.get("/ready").status_code == 503)
            time.sleep(3)  # it was cut off after one second
            status, _, reply = read_reply(client)
        assert status == 200 and len(json.loads(reply)["choices"]) == BIG["n"]
        assert server.process.wait(10) == 0


# ---- connections


@pytest.mark.long
def test_connections_without_a_request_are_closed(tiny_model: Path) -> None:
    constants = {"chairlift.serving.listening.HEAD_SECONDS": 1.0}
    with (
        running(tiny_model, "--log-level", "error", fake=True, constants=constants) as server,
        connected(server) as silent,
        connected(server) as slow,
        connected(server) as idle,
    ):
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_reply(idle)[0] == 200
        slow.sendall(b"GET /health HTTP/1.1\r\n")

        def drip() -> None:  # a byte now and then makes no head
            try:
                for _ in range(100):
                    slow.sendall(b"a")
                    time.sleep(0.1)
            except OSError:
                pass

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert silent.recv(100) == b""
        dripping.join()
        assert server.metric("connections_closed_total", reason="no_head") == 2
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")  # between two requests it may be idle for longer
        assert read_reply(idle)[0] == 200


@pytest.mark.long
@pytest.mark.parametrize("clients", [400, pytest.param(4000, marks=pytest.mark.long)])
def test_a_server_without_descriptors_answers_and_replaces_its_engine(tiny_model: Path, clients: int) -> None:
    with running(tiny_model, fake=True, open_files=256) as server:
        with ExitStack() as stack:
            for number in range(clients):
                stack.enter_context(connected(server))
                if number % 50 == 0:
                    assert server.is_healthy()
            os.kill(server.engine_pid(), signal.SIGKILL)
            server.wait_until(lambda: not server.is_healthy(), 20)
            server.wait_until(server.is_healthy, 60)
            assert server.post(COMPLETION, ONE).status_code == 200
            assert server.metric("connections_closed_total", reason="evicted") > clients - 256
        assert len(server.logged()) < 20_000 + 200 * clients / 50
        adds_up(server)


@pytest.mark.long
def test_health_is_answered_while_every_connection_has_a_request(tiny_model: Path) -> None:
    environment = {"FAKE_STEP": "0.05", "FAKE_SEQUENCES": "256"}
    stream = post({"prompt": "Hello", "max_tokens": 400, "stream": True})
    with running(tiny_model, fake=True, open_files=200, environment=environment) as server, ExitStack() as stack:
        first = []
        for _ in range(150):
            client = stack.enter_context(connected(server))
            client.sendall(stream)
            first.append(client.recv(100))
        served = sum(each.startswith(b"HTTP/1.1 200") for each in first)
        assert 20 < served < 150 and {each[9:12] for each in first} == {b"200", b"503"}
        for _ in range(10):
            assert server.is_healthy()
        refused = server.post(COMPLETION, ONE)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        client = stack.enter_context(connected(server))
        client.sendall(stream[:-5])  # its body never arrives whole
        assert read_all(client).lower().count(b"connection: close") == 1
        stack.close()
        server.wait_until(lambda: server.post(COMPLETION, ONE).status_code == 200)
        adds_up(server)


# ---- bodies


@pytest.fixture(scope="module")
def keyed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = keys_file(tmp_path_factory.mktemp("keys"), alice="")
    with running(tiny_model, "--api-keys", keys, "--log-level", "error", fake=True) as server:
        server.key = "sk-key-of-operator"
        yield server
        adds_up(server)


@pytest.mark.parametrize("key", mostly_long(["sk-key-of-alice", None]))
@pytest.mark.parametrize("clients", [10, pytest.param(100, marks=pytest.mark.long)])
def test_bodies_in_chunks_of_a_byte_cost_next_to_nothing(keyed: Running, key: str | None, clients: int) -> None:
    raw = in_chunks(b"x" * 150_000, 1, key)
    before, replies = cpu_seconds(keyed.process.pid), []

    def ask() -> None:
        with connected(keyed) as client:
            with suppress(OSError):  # refused before it was all sent
                client.sendall(raw)
            replies.append(read_reply(client))

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    each = (cpu_seconds(keyed.process.pid) - before) / clients
    assert each < (0.1 if key is None else 0.4), f"{each} s of CPU for each"
    assert len(replies) == clients
    for status, headers, body in replies:
        assert status == (401 if key is None else 400)
        assert headers["connection"] == "close"
        assert json.loads(body)["error"]["code"] == ("invalid_api_key" if key is None else "invalid_http")


def test_bodies_may_come_in_any_chunks_that_make_sense(keyed: Running) -> None:
    small, large = {**ONE, "user": "u" * 1000}, {**ONE, "prompt": [5] * 200, "user": "u" * 300_000}
    for body, size in ((small, 1), (small, 7), (large, 300), (large, 100_000)):
        with connected(keyed) as client:
            for _ in range(2):  # and the connection stays
                client.sendall(in_chunks(json.dumps(body).encode(), size, "sk-key-of-alice"))
                status, headers, reply = read_reply(client)
                assert status == 200, reply
                assert "connection" not in headers


def test_a_body_that_comes_in_single_packets_is_read(keyed: Running) -> None:
    raw = post({**ONE, "user": "u" * 500}, "sk-key-of-alice")
    with connected(keyed) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(raw), 5):
            client.sendall(raw[start : start + 5])
            time.sleep(0.001)
        assert read_reply(client)[0] == 200


def test_requests_that_come_together_are_answered_one_by_one(keyed: Running) -> None:
    asked = [post(ONE, "sk-key-of-alice"), in_chunks(json.dumps(ONE).encode(), 9, "sk-key-of-alice")]
    raw = b"".join([*asked, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", *asked])
    with connected(keyed) as client:
        client.sendall(raw.replace(b"Content-Length", b"Expect: 100-continue\r\nContent-Length", 1))
        found = b""
        while found.count(b"HTTP/1.1 200") < 5:
            part = client.recv(1 << 16)
            assert part, found
            found += part


@pytest.mark.parametrize(
    ("key", "size", "status"), [(None, 1 << 20, 401), (None, 100, 401), ("sk-key-of-alice", 9 << 20, 413)]
)
def test_a_refused_body_is_not_read_and_the_client_is_told_why(
    keyed: Running, key: str | None, size: int, status: int
) -> None:
    with connected(keyed) as client:
        with suppress(OSError):
            client.sendall(post({**ONE, "user": "u" * size}, key))
        found, headers, body = read_reply(client)
        assert found == status and json.loads(body)["error"]
        if size > 1000:
            assert headers["connection"] == "close"
            assert read_all(client) == b""
        else:  # it came whole with its head: the connection stays
            client.sendall(post(ONE, "sk-key-of-alice"))
            assert read_reply(client)[0] == 200


@pytest.mark.long
def test_all_bodies_together_are_bounded_until_they_are_admitted(tiny_model: Path) -> None:
    constants = {"chairlift.serving.service._BODIES": 3_000_000}
    with running(tiny_model, "--log-level", "error", fake=True, constants=constants) as server, ExitStack() as stack:
        raw = post({**ONE, "user": "u" * 1_000_000})
        half = [stack.enter_context(connected(server)) for _ in range(6)]
        for client in half:
            client.sendall(raw[:-1])
        time.sleep(0.5)
        for client in half:
            client.sendall(raw[-1:])
        found = sorted(read_reply(client)[0] for client in half)
        assert found.count(200) == 3 or found.count(200) == 2
        assert set(found) == {200, 429}
        assert server.post(COMPLETION, {**ONE, "user": "u" * 1_000_000}).status_code == 200
