"""A rank killed under a server's load: clients get errors, health says so, the engine starts again, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
from running import Running, running

BODY = {"prompt": "the answer to the question", "max_tokens": 450, "ignore_eos": True, "stream": True}
CLIENTS = 6


def rank_processes(server: Running) -> list[int]:
    """The rank processes of a server's engine."""
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    engines = {pid for pid, parent, args in rows if int(parent) == server.process.pid and "engine_process" in args}
    return [int(pid) for pid, parent, args in rows if parent in engines and "rank_process" in args]


def ask(server: Running, seen: list[tuple[int, str, float]]) -> None:
    """Stream one answer; note its tokens, how it ended and when."""
    tokens, ended = 0, "cut off"
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=60) as reply:
        if reply.status_code == 503 and "error" in json.loads(reply.read()):
            ended = "refused"  # it came after the engine's end
        for line in reply.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = "done" if ended == "cut off" else ended
                break
            found = json.loads(line.removeprefix("data: "))
            if "error" in found:
                ended = "error"
            else:
                tokens += 1
    seen.append((tokens, ended, time.monotonic()))


def lose_a_rank(server: Running, how: signal.Signals = signal.SIGKILL) -> dict[str, float]:
    [rank] = rank_processes(server)
    seen: list[tuple[int, str, float]] = []
    clients = [threading.Thread(target=ask, args=(server, seen)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    server.wait_until(lambda: server.metric("num_requests_running") > 0)
    killed = time.monotonic()
    os.kill(rank, how)
    unwell = server.wait_until(lambda: not server.is_healthy())
    for client in clients:
        client.join()
    assert {ended for _, ended, _ in seen} <= {"done", "error", "refused"}, "every client is told how its answer ended"
    assert any(ended == "error" for _, ended, _ in seen)
    errors = [at - killed for _, ended, at in seen if ended == "error"]
    well = server.wait_until(server.is_healthy, 120)
    assert not Path(f"/proc/{rank}").exists()
    assert len(rank_processes(server)) == 1
    server.wait_until(server.is_idle)
    reply = server.post("/v1/completions", {**BODY, "max_tokens": 4, "stream": False})
    assert reply.json()["usage"]["completion_tokens"] == 4
    return {"errors after": max(errors), "unhealthy after": unwell, "healthy again after": well, "clients": len(errors)}


@pytest.mark.long
def test_a_rank_that_hangs_ends_the_engine_after_its_deadline(tiny_model: Path) -> None:
    with running(tiny_model, "--tensor-parallel", "2", "--log-level", "error") as server:
        found = lose_a_rank(server, signal.SIGSTOP)
        print(json.dumps(found))
        assert found["errors after"] < 20


@pytest.mark.long
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.long)])
def test_a_killed_rank_ends_the_engine_and_it_comes_back(tiny_model: Path, times: int) -> None:
    with running(tiny_model, "--tensor-parallel", "2", "--log-level", "error") as server:
        for _ in range(times):
            found = lose_a_rank(server)
            print(json.dumps(found))
            assert found["errors after"] < 5  # a second and the machine's load; a lost engine alone would take 10
        left = rank_processes(server)
        assert "rank 1 of 2 was killed by SIGKILL" in server.logged()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in left):
        assert time.monotonic() < deadline, "a rank outlives its server"
        time.sleep(0.05)
