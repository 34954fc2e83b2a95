"""RankHolder: the actor of one rank of --tensor-parallel, on a node of its own placement bundle."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from chairlift import __version__
from chairlift.cluster.parent import watch_parent
from chairlift.cluster.tensor_parallel.rank_host import RankHost

STRATEGIES = {"pack": "PACK", "spread": "SPREAD"}


class RankHolder:
    """Runs a rank host for as long as the actor lives."""

    def __init__(self) -> None:
        watch_parent()

    async def start(self, version: str, key: str, host: str | None, cpus: float | None) -> str:
        """Return HOST:PORT, where the rank host waits for rank 0."""
        check_version(version)
        self._host = RankHost(host or ray.util.get_node_ip_address(), key, environment(cpus))
        return self._host.address

    async def wait(self) -> None:
        """Never return: the caller learns of the actor's end."""
        await asyncio.Event().wait()


def check_version(version: str) -> None:
    """Raise an error on a node with another version of Chairlift."""
    if version != __version__:
        raise RuntimeError(f"this node has Chairlift {__version__}, the driver {version}: install the same")


def environment(cpus: float | None) -> dict[str, str]:
    """Return the environment of a process that computes; Ray has chosen its GPUs, or it has so many cores."""
    if cpus is None:
        return {**os.environ}
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(max(1, int(cpus))))}


def place(ranks: int, resources: dict[str, float], placement: str) -> PlacementGroup:
    """Return a placement group with a bundle for each rank."""
    return placement_group([resources] * ranks, strategy=STRATEGIES[placement])


def in_bundle(group: PlacementGroup, rank: int) -> dict[str, Any]:
    """Return the options of an actor that belongs to a rank."""
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank)}
