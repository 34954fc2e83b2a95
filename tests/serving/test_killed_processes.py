"""A server with several processes, of which some are killed or stand still: limits hold, and counts add up."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from raw_http import COMPLETION, connected, post
from running import keys_file, running

from mostly_long import TIMES
from processes import megabytes, standing_still

ONE = {"prompt": "Hello", "max_tokens": 1}


@pytest.mark.long
def test_a_tenant_s_limits_hold_over_all_http_processes(tiny_model: Path, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, bob="max_concurrent = 4", carol="tokens_per_minute = 20")
    flags = ("--api-workers", "2", "--api-keys", keys, "--log-level", "error")
    stream = post({"prompt": "Hello", "max_tokens": 400, "stream": True}, "sk-key-of-bob")
    bob, carol = ({"Authorization": f"Bearer sk-key-of-{name}"} for name in ("bob", "carol"))
    with running(tiny_model, *flags, fake=True, environment={"FAKE_STEP": "0.05"}) as server:
        server.key = "sk-key-of-operator"
        first, second = server.process.pid, server.child("http_process")
        with standing_still(first):
            server.wait_until(server.is_healthy)
        with ExitStack() as stack:
            with standing_still(first):
                for _ in range(4):
                    client = stack.enter_context(connected(server))
                    client.sendall(stream)
                    assert client.recv(100).startswith(b"HTTP/1.1 200")
                assert server.post(COMPLETION, {**ONE, "max_tokens": 60}, headers=carol).status_code == 200
            with standing_still(second):
                refused = server.post(COMPLETION, ONE, headers=bob)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_limit")
                refused = server.post(COMPLETION, ONE, headers=carol)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_rate")
            os.kill(second, signal.SIGKILL)  # its requests are gone with it
            server.wait_until(lambda: server.post(COMPLETION, ONE, headers=bob).status_code == 200, 30)
        server.wait_until(server.is_idle, 60)


@pytest.mark.long
def test_processes_that_are_killed_under_load_leave_counts_that_add_up(tiny_model: Path) -> None:
    flags = ("--api-workers", "2", "--log-level", "error")
    stream = post({"prompt": "Hello", "max_tokens": 400, "stream": True})
    with running(tiny_model, *flags, fake=True, environment={"FAKE_STEP": "0.02"}) as server:
        for number in range(2 * TIMES):
            with ExitStack() as stack:
                for _ in range(24):
                    stack.enter_context(connected(server)).sendall(stream)

                def is_loaded(stack: ExitStack = stack) -> bool:
                    """Whether enough streams run; one more is sent for one that was refused without an engine."""
                    if server.metric("num_requests_running") > 10:
                        return True
                    stack.enter_context(connected(server)).sendall(stream)
                    return False

                server.wait_until(is_loaded, 60)
                os.kill(server.engine_pid() if number % 2 else server.child("http_process"), signal.SIGKILL)
                server.wait_until(server.is_healthy, 60)
            server.wait_until(server.is_idle, 60)
            server.wait_until(lambda: server.has_child("http_process"), 60)
            server.wait_until(lambda: all(server.post(COMPLETION, ONE).status_code == 200 for _ in range(12)), 60)
        assert server.metric("requests_failed_total") > 0
        assert server.metric("requests_submitted_total") >= 2 * TIMES * 10


@pytest.mark.long
def test_an_engine_is_replaced_after_the_folder_of_its_sockets_was_removed(tiny_model: Path) -> None:
    with running(tiny_model, "--api-workers", "2", fake=True) as server:
        for _ in range(16):  # both HTTP processes are connected
            server.wait_until(lambda: server.post(COMPLETION, ONE).status_code == 200)
        inodes = Path("/proc/net/unix").read_text().splitlines()
        folders = {Path(line.split()[-1]).parent for line in inodes if "/chairlift-" in line}
        folder = next(each for each in folders if owns(server.process.pid, each))
        shutil.rmtree(folder)
        assert server.post(COMPLETION, ONE).status_code == 200, "the engine that is connected stays so"
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.wait_until(lambda: "the engine process ended" in server.logged(), 20)
        server.wait_until(server.is_healthy, 60)
        for _ in range(8):  # by either process
            server.wait_until(lambda: server.post(COMPLETION, ONE).status_code == 200, 60)
        time.sleep(1)
        assert server.logged().count("the engine process ended") == 1, "it dies again and again"
        assert folder.stat().st_mode & 0o777 == 0o700


def owns(pid: int, folder: Path) -> bool:
    """Whether a process listens on a socket in a folder."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if f"{folder}/" in line]
    held = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    return any(f"socket:[{line[6]}]" in held for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("n", [4, 64])
def test_an_http_process_that_stands_still_holds_up_little_memory_and_is_told_what_it_missed(
    tiny_model: Path, n: int
) -> None:
    environment = {"FAKE_STEP": "0.001", "FAKE_SEQUENCES": "256"}
    stream = post({"prompt": "Hello", "max_tokens": 500, "n": n, "logprobs": 64, "stream": True})
    with running(tiny_model, "--log-level", "error", fake=True, environment=environment) as server:
        pid, engine = server.process.pid, server.engine_pid()
        before = megabytes(engine, "VmHWM")
        with ExitStack() as stack:
            clients = [stack.enter_context(connected(server)) for _ in range(4)]
            for client in clients:
                client.sendall(stream)
                assert client.recv(100).startswith(b"HTTP/1.1 200")
            readers = [threading.Thread(target=read_until_done, args=(client,)) for client in clients]
            for reader in readers:
                reader.start()
            with standing_still(pid):
                time.sleep(8)
            for reader in readers:
                reader.join(120)
                assert not reader.is_alive(), "a stream was left without an end"
        assert megabytes(engine, "VmHWM") - before < 150
        assert server.engine_pid() == engine
        server.wait_until(server.is_idle, 60)


def read_until_done(client: socket.socket) -> None:
    last = b""
    while b"data: [DONE]" not in last:
        part = client.recv(1 << 20)
        assert part, f"it broke off after {last!r}"
        last = last[-100:] + part
