"""A real Ray cluster of three raylets on this machine, for tests, and our server on it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.append(str(Path(__file__).parents[1] / "serving"))
from running import FAKE, Running, started

# A busy machine starts Ray's processes far slower than Ray expects. Ray reads these when it is imported.
os.environ |= {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
}
pytest.importorskip("ray", reason="Ray is not installed: pip install 'chairlift[ray]'")

from ray.cluster_utils import Cluster

from chairlift.cluster.ray.serve import RayPlan
from chairlift.serving.plan import ModelPlan, Plan

_SERVE = """
import sys, msgspec
from chairlift.cluster.ray import serve
plan, on = msgspec.json.decode(sys.argv[1], type=tuple[serve.Plan, serve.RayPlan])
sys.exit(serve.run(plan, on, lambda text: print(text, file=sys.stderr, flush=True)))
"""


@dataclass(slots=True)
class Raylets:
    """A cluster of three raylets with one CPU each; a replica takes one."""

    cluster: Any
    doomed: set[int] = field(default_factory=set)  # processes of the nodes that were killed

    @contextmanager
    def serving(
        self, model: Path, on: RayPlan, *, fake: bool = True, settings: dict[str, Any] | None = None
    ) -> Iterator[Running]:
        """The server of `chairlift serve --on ray`; with `fake`, its engines only pretend."""
        command = FAKE if fake else None
        plan = Plan(
            [ModelPlan("tiny", str(model))], settings or {}, port=0, log_level="warning", engine_command=command
        )
        arguments = [sys.executable, "-c", _SERVE, msgspec.json.encode([plan, on]).decode()]
        with started(arguments, {"RAY_ADDRESS": self.cluster.address}) as found:
            yield found

    def pids(self, *names: str) -> dict[int, int]:
        """The cluster's processes with a name in their command line, each with the raylet that it descends from."""
        above_of, raylets = parents(), {raylet_of(node) for node in self.cluster.list_all_nodes()}
        found = {}
        for pid in above_of:
            above = pid
            while above not in raylets and above in above_of:
                above = above_of[above]
            if above in raylets and any(name in _command(pid) for name in names):
                found[pid] = above
        return found

    def busy(self) -> list[Any]:
        """The nodes other than the first that run a replica's server."""
        raylets = self.pids("ray.server_process").values()
        return [node for node in self.cluster.worker_nodes if raylet_of(node) in raylets]

    def kill(self, node: Any) -> None:
        """Kill a node's raylet with SIGKILL; the rest of the node ends soon after it."""
        self.doomed |= {pid for pid, raylet in self.pids("").items() if raylet == raylet_of(node)}
        os.kill(raylet_of(node), 9)
        self.cluster.worker_nodes.discard(node)

    def has_ended(self) -> bool:
        """Whether all processes of the killed nodes have ended."""
        return not any(_is_running(pid) for pid in self.doomed)

    def add(self) -> None:
        """Add a node."""
        self.cluster.add_node(num_cpus=1, object_store_memory=80 << 20)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def parents() -> dict[int, int]:
    """The parent of each process."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return {int(pid): int(parent) for pid, parent in map(str.split, listed.splitlines())}


def listens_at(pid: int) -> str:
    """The URL of a process that listens on one IPv4 port."""
    held = set(_descriptors(pid))
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, own, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in held:
            address, port = (int(part, 16) for part in own.split(":"))
            return f"http://{socket.inet_ntoa(address.to_bytes(4, sys.byteorder))}:{port}"
    raise AssertionError(f"process {pid} does not listen")


def _descriptors(pid: int) -> Iterator[str]:
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed a moment ago
            yield str(each.readlink())


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@contextmanager
def raylets(environment: dict[str, str]) -> Iterator[Raylets]:
    """Three raylets; their processes have an environment of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        first = {"num_cpus": 1, "include_dashboard": False}
        found = Raylets(Cluster(initialize_head=True, head_node_args={**first, "object_store_memory": 80 << 20}))
        try:
            for _ in range(2):
                found.add()
            yield found
        finally:
            found.cluster.shutdown()
