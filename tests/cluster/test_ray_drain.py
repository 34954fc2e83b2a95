"""What `chairlift serve --on ray` does while it drains; without a cluster."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'chairlift[ray]'")

from chairlift.cluster.ray import serve
from chairlift.cluster.ray.serve import RayPlan
from chairlift.routing.scaling import Load
from chairlift.serving.plan import ModelPlan, Plan

pytestmark = pytest.mark.long  # importing ray takes seconds


class Replicas:
    """Replicas that only count how often their number is chosen."""

    def __init__(self) -> None:
        self.chosen = 0
        self.are_closed = False

    def scale_to(self, count: int) -> None:
        self.chosen += 1

    def load(self) -> Any:
        return Load(1, 0, 0, 1)

    async def wait(self) -> None:
        pass

    async def close(self) -> None:
        self.are_closed = True


def test_no_replica_is_started_or_ended_while_the_gateway_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is started then would serve nothing, and one that is ended might still have requests."""
    replicas, said = Replicas(), list[str]()
    monkeypatch.setattr(serve, "make", lambda *_: replicas)
    monkeypatch.setattr(serve, "PROBE_EVERY", 0.01)

    async def until(condition: Any) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.01)

    async def run() -> None:
        plan = Plan([ModelPlan("tiny", "tiny")], {}, port=0)
        serving = asyncio.create_task(serve._serve(plan, RayPlan(1, 2), said.append, "127.0.0.1"))
        await until(lambda: replicas.chosen > 3)
        found = re.search(r"http://127.0.0.1:(\d+)", said[-1])
        assert found is not None
        _, writer = await asyncio.open_connection("127.0.0.1", int(found[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")  # its body is not sent
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        chosen = replicas.chosen
        await asyncio.sleep(0.1)
        assert not serving.done() and not replicas.are_closed, "it drains"
        assert replicas.chosen == chosen
        writer.close()
        await asyncio.wait_for(serving, 5)
        assert replicas.are_closed

    asyncio.run(run())
