"""A rank killed under a server's load: clients get errors, health says so, the engine starts again, nothing is left."""

from __future__ import annotations

import json
import os
import re
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

from mostly_long import TIMES
from processes import is_running

BODY = {"prompt": "the answer to the question", "max_tokens": 450, "ignore_eos": True, "stream": True}
CLIENTS = 6


def rank_processes(server: Running) -> list[int]:
    """The rank processes of a server's engine."""
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    engines = {pid for pid, parent, args in rows if int(parent) == server.process.pid and "engine_process" in args}
    return [int(pid) for pid, parent, args in rows if parent in engines and "rank_process" in args]


def ask(server: Running) -> str:
    """Stream one answer; return how it ended."""
    ended = "cut off"
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=120) as reply:
        if reply.status_code == 503 and "error" in json.loads(reply.read()):
            return "refused"  # it came after the engine's end
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                return "done" if ended == "cut off" else ended
            if line.startswith("data: ") and "error" in json.loads(line.removeprefix("data: ")):
                ended = "error"
    return "cut off"


def ask_until_lost(server: Running, ends: list[str]) -> None:
    """Stream one answer after the other, so that some run whenever the rank is lost."""
    while not ends or ends[-1] == "done":
        ends.append(ask(server))


def lose_a_rank(server: Running, how: signal.Signals = signal.SIGKILL) -> None:
    [rank] = rank_processes(server)
    ends: list[list[str]] = [[] for _ in range(CLIENTS)]
    clients = [threading.Thread(target=ask_until_lost, args=(server, each)) for each in ends]
    for client in clients:
        client.start()
    server.wait_until(lambda: server.metric("num_requests_running") > 0)
    os.kill(rank, how)
    server.wait_until(lambda: not server.is_healthy())
    for client in clients:
        client.join()
    assert {end for each in ends for end in each} <= {"done", "error", "refused"}, "a client does not learn its end"
    assert "error" in [each[-1] for each in ends]
    server.wait_until(server.is_healthy, 120)
    assert not is_running(rank)
    assert len(rank_processes(server)) == 1
    server.wait_until(server.is_idle)
    reply = server.post("/v1/completions", {**BODY, "max_tokens": 4, "stream": False})
    assert reply.json()["usage"]["completion_tokens"] == 4


@pytest.mark.long
def test_a_rank_that_hangs_ends_the_engine_after_its_deadline(tiny_model: Path) -> None:
    with running(tiny_model, "--tensor-parallel", "2", "--log-level", "error") as server:
        lose_a_rank(server, signal.SIGSTOP)
        # Both are named if they stopped at the same operation: rank 0 then waits for rank 1 in it.
        assert re.search(r"(rank|ranks 0 and) 1 of 2 ha(s|ve) not answered for 8 s", server.logged())


@pytest.mark.long
def test_a_killed_rank_ends_the_engine_and_it_comes_back(tiny_model: Path) -> None:
    with running(tiny_model, "--tensor-parallel", "2", "--log-level", "error") as server:
        for _ in range(TIMES):
            lose_a_rank(server)
        left = rank_processes(server)
        logged = server.logged()
        assert logged.count("the device has failed: rank 1 of 2 was killed by SIGKILL") == TIMES
        assert "has not answered" not in logged, "its end was noticed by the deadline alone"
    deadline = time.monotonic() + 60
    while any(map(is_running, left)):
        assert time.monotonic() < deadline, "a rank outlives its server"
        time.sleep(0.05)
