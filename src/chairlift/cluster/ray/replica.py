"""Replica: the actor that runs one server process on its node."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from typing import Any

import msgspec
import ray

from chairlift.cluster.parent import watch_parent
from chairlift.cluster.ray.ranks import check_version, environment
from chairlift.cluster.ray.server_process import Job, Report
from chairlift.cluster.tensor_parallel.remote import Remote
from chairlift.serving.plan import Plan

log = logging.getLogger("chairlift")

_GRACE = 10.0  # seconds for a server without requests to end after SIGTERM
_MEMORY_SHARE = 0.5  # of a node without GPUs, as for one engine on a machine


class Ended(msgspec.Struct, frozen=True):
    """How a server process has ended."""

    reason: str
    is_refusal: bool = False  # the settings or the model cannot work: another attempt would end in the same way


class Replica:
    """Runs `chairlift serve` with the settings of a plan; the process ends with the actor, whatever ends that."""

    def __init__(self) -> None:
        watch_parent()
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, version: str, job: bytes, ranks: list[str], key: str) -> str:
        """Start the server; return its URL, where it answers when the model is loaded.

        `ranks` are the addresses of the rank hosts of ranks 1 and up, if these are on other nodes, which know the key.
        """
        check_version(version)
        given = msgspec.json.decode(job, type=Job)
        host = given.host or ray.util.get_node_ip_address()
        settings = {**given.plan.settings}
        if given.cpus is not None:
            parts = max(1, int(_own_node().get("CPU", 1.0) // given.cpus))  # replicas that this node has room for
            settings["memory_share"] = (settings.get("memory_share") or _MEMORY_SHARE) / parts
        remote = Remote(ranks, key, host) if ranks else None
        plan: Plan = msgspec.structs.replace(given.plan, host=host, port=0, settings=settings, remote=remote)
        command = (sys.executable, "-m", "chairlift.cluster.ray.server_process")
        # Not asyncio's: it relies on signals, which the event loop of an actor, in a thread of its own, may not get.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment(given.cpus))
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(msgspec.structs.replace(given, plan=plan, parent=os.getpid())))
        self._process.stdin.close()
        port = (await self._report()).port
        if port is None:
            raise RuntimeError("the server process ended before it listened")
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def wait(self) -> bytes:
        """Wait for the end of the server; return an Ended in JSON."""
        assert self._process is not None
        report = await self._report()
        code = await asyncio.to_thread(self._process.wait)
        if report.error is not None:
            return msgspec.json.encode(Ended(report.error, is_refusal=True))
        return msgspec.json.encode(Ended(f"its server process ended with code {code}"))

    async def stop(self) -> None:
        """End the server, which has no requests any more."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, _GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()

    async def _report(self) -> Report:
        """Return the next report of the server process; an empty one if it has ended."""
        assert self._process is not None and self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        return msgspec.json.decode(line, type=Report) if line else Report()


def _own_node() -> dict[str, Any]:
    own = ray.get_runtime_context().get_node_id()
    return next((node["Resources"] for node in ray.nodes() if node["NodeID"] == own), {})
