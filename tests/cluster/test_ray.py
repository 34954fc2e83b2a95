"""Replicas on a Ray cluster of three raylets: their number follows the queue, they end with their command; ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import Raylets, raylet_of, raylets
from running import Running

from chairlift import LLM, SamplingParams
from chairlift.cluster.ray.serve import RayPlan

COMPLETION = "/v1/completions"
ROWS = 4  # of each replica's batch: further requests wait without a token


def states(server: Running) -> dict[str, str]:
    return dict(server.get("/health").json()["servers"])


def are_well(server: Running, count: int) -> bool:
    return list(states(server).values()) == ["ok"] * count


def asks(tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": "Hello", "max_tokens": tokens, "ignore_eos": True, **more}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets({"FAKE_STEP": "0.03", "FAKE_SEQUENCES": str(ROWS)}) as found:
        yield found


@pytest.mark.long
def test_replicas_end_with_a_command_that_is_killed(cluster: Raylets, tiny_model: Path) -> None:
    with cluster.serving(tiny_model, RayPlan(2, 2)) as server:
        server.wait_until(lambda: are_well(server, 2), 300)
        processes = cluster.pids("ray.server_process", "fake_engine")
        assert len(processes) == 4
        server.process.kill()
        server.wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), 60)


@pytest.mark.long
def test_replicas_follow_the_queue_from_one_to_three_and_back(cluster: Raylets, tiny_model: Path) -> None:
    plan = RayPlan(1, 3, queued_tokens=40, up_after=1.0, down_after=3.0)
    with cluster.serving(tiny_model, plan) as server, ThreadPoolExecutor(40) as threads:
        assert are_well(server, 1)
        is_enough = threading.Event()

        def ask() -> set[int]:
            found = set()
            while not is_enough.is_set():
                found.add(server.post(COMPLETION, asks(30), timeout=300).status_code)
            return found

        asking = [threads.submit(ask) for _ in range(36)]
        try:
            server.wait_until(lambda: are_well(server, 3), 300)
            server.wait_until(lambda: all(finished(server, place) > 20 for place in range(3)), 100)
        finally:
            is_enough.set()
        assert set().union(*(each.result() for each in asking)) == {200}
        server.wait_until(lambda: are_well(server, 1), 300)
        assert server.post(COMPLETION, asks(2)).status_code == 200


def finished(server: Running, place: int) -> float:
    return server.metric("router_requests_total", replica=f"replica-{place}", state="finished")


@pytest.mark.long
def test_ranks_on_nodes_of_their_own_give_the_tokens_of_one_rank(cluster: Raylets, tiny_model: Path) -> None:
    """When a rank's process is killed, the engine is started again; when a raylet is, the replica elsewhere."""
    settings = {"dtype": "float32", "kv_tokens": 1024, "tensor_parallel": 2}
    prompts = ["Hello", "The answer is", "What was the question? " * 8]

    def told(server: Running) -> list[Any]:
        bodies = [asks(24, prompt=prompt, temperature=0) for prompt in prompts]
        return [server.post(COMPLETION, body).json()["choices"] for body in bodies]

    with LLM(str(tiny_model), dtype="float32", kv_tokens=1024) as one:
        found = one.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    expected = [each.outputs[0].text for each in found]
    with cluster.serving(tiny_model, RayPlan(ranks="spread"), fake=False, settings=settings) as server:
        nodes = set(cluster.pids("rank_process", "ray.server_process").values())
        assert len(nodes) == 2, "both ranks are on one node"
        assert [choices[0]["text"] for choices in told(server)] == expected
        [rank] = cluster.pids("rank_process")
        os.kill(rank, signal.SIGKILL)
        server.wait_until(lambda: not are_well(server, 1))
        server.wait_until(lambda: are_well(server, 1), 300)
        assert [choices[0]["text"] for choices in told(server)] == expected
        doomed = next(node for node in cluster.cluster.worker_nodes if raylet_of(node) in nodes)
        cluster.kill(doomed)
        server.wait_until(lambda: not are_well(server, 1))
        server.wait_until(lambda: are_well(server, 1), 300)
        assert [choices[0]["text"] for choices in told(server)] == expected
        server.wait_until(cluster.has_ended, 30)
    cluster.add()
