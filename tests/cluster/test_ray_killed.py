"""SIGKILL of an engine, an actor and a raylet on Ray, under load: what clients see, and what comes back.

A few times each, or as often as TIMES in the environment says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest
from ray_cluster import Raylets, listens_at, parents, raylets
from running import Running
from test_chaos import Client, ended_well
from test_ray import COMPLETION, are_well, asks

from chairlift.cluster.ray.serve import RayPlan
from mostly_long import TIMES

pytestmark = pytest.mark.long
ROWS = 4  # of each replica's batch: further requests wait without a token
CLIENTS = 24


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets({"FAKE_STEP": "0.03", "FAKE_SEQUENCES": str(ROWS)}) as found:
        yield found


def kill_engine(cluster: Raylets, number: int) -> None:
    os.kill(sorted(cluster.pids("fake_engine"))[number % 2], signal.SIGKILL)


def kill_actor(cluster: Raylets, number: int) -> None:
    """Kill the worker process of an actor; the replica's server is its child."""
    os.kill(parents()[sorted(cluster.pids("ray.server_process"))[number % 2]], signal.SIGKILL)


def kill_raylet(cluster: Raylets, number: int) -> None:
    cluster.kill(cluster.busy()[0])


@pytest.mark.parametrize("kill", [kill_engine, kill_actor, kill_raylet])
def test_a_killed_replica_costs_only_the_requests_that_had_a_token(
    cluster: Raylets, tiny_model: Path, kill: Callable[[Raylets, int], None]
) -> None:
    """Two replicas and 24 requests: 16 wait without a token when one replica is lost, however it is."""
    ends, seconds = Counter[str](), list[float]()
    with cluster.serving(tiny_model, RayPlan(2, 2)) as server:
        server.wait_until(lambda: are_well(server, 2), 300)
        for number in range(TIMES):
            answers, took = asyncio.run(lose(cluster, server, 2, lambda at=number: kill(cluster, at), 100))
            found = list(map(end_of, answers))
            broken = [answer for answer, end in zip(answers, found, strict=True) if end != "complete"]
            assert 1 <= len(broken) <= ROWS, "only a batch of them had a token from the replica that was lost"
            assert all(b'"text"' in answer for answer in broken), "a request without a token was not sent to the other"
            ends.update(found)
            seconds.append(took)
            print(f"{took:.1f} s", end=" ", flush=True)
            if kill is kill_raylet:
                server.wait_until(cluster.has_ended, 30)
                cluster.add()
    tell(kill.__name__, ends, seconds)


async def lose(
    cluster: Raylets, server: Running, replicas: int, kill: Callable[[], None], tokens: int
) -> tuple[list[bytes], float]:
    """Kill something under load; return the answers, and the seconds until all replicas serve again."""
    clients = [Client(server) for _ in range(CLIENTS)]
    for client in clients:
        await client.send(asks(tokens, stream=True), path=COMPLETION)
    reading = [asyncio.create_task(client.read_all()) for client in clients]
    while sum(server.metric("replica_requests", replica=f"replica-{place}") for place in range(replicas)) < CLIENTS:
        await asyncio.sleep(0.02)
    await asyncio.sleep(1)  # the first batch of each has tokens
    kill()
    took = await asyncio.to_thread(seconds_until_back, server, replicas)
    answers = list(await asyncio.gather(*reading))
    for pid in cluster.pids("ray.server_process"):
        replica = Running(listens_at(pid), server.process)
        server.wait_until(replica.is_idle)  # its counts add up and no block is held
    return answers, took


def seconds_until_back(server: Running, replicas: int) -> float:
    start = time.monotonic()
    server.wait_until(lambda: not are_well(server, replicas))
    server.wait_until(lambda: are_well(server, replicas), 300)
    return time.monotonic() - start


def end_of(answer: bytes) -> str:
    """How a stream ended: complete, with an error event, or refused before it began."""
    if b" 503 " in answer.partition(b"\r\n")[0]:
        return "refused"
    return "complete" if ended_well(answer, stream=True) == "complete" else "error event"


def tell(what: str, ends: Counter[str], seconds: list[float]) -> None:
    print(f"{what}, {TIMES} times: {dict(ends)}; all serve again after {median(seconds):.1f} s (median), ", end="")
    print(f"{max(seconds):.1f} s (longest); 0 blocks held")
