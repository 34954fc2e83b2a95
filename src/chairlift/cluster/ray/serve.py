"""`chairlift serve --on ray`: replicas on a Ray cluster, and the gateway in front of them in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import ray

from chairlift.cluster.ray.connect import connected
from chairlift.cluster.ray.replicas import Need, Replicas, names_of
from chairlift.cluster.ray.server_process import Job
from chairlift.gateway.backend import PROBE_EVERY
from chairlift.gateway.pool import Pool
from chairlift.gateway.run import GatewayPlan, serve_pool
from chairlift.routing.scaling import Scaling
from chairlift.serving import logs
from chairlift.serving.keys import Keyring
from chairlift.serving.listening import allow_files
from chairlift.serving.plan import Plan
from chairlift.serving.server import read_keyring

MOST = 64  # replicas
_LOOPBACK = "127.0.0.1"  # where replicas of a cluster that was started here listen


class RayPlan(msgspec.Struct, frozen=True):
    """How many replicas there are and what each takes of the cluster."""

    least: int = 1
    most: int = 1
    cpus: float = 1.0  # of a replica where it has no GPUs
    ranks: str = "node"  # where those of a replica are: all on one node, or each an actor: pack, spread
    queued_tokens: int = 8192  # a replica, above which another is started
    up_after: float = 5.0  # seconds
    down_after: float = 60.0


def run(plan: Plan, on: RayPlan, say: Callable[[str], None]) -> int:
    """Run replicas and gateway until a signal; return the exit code."""
    logs.set_up(plan.log_format, plan.log_level)
    allow_files()
    with connected() as address:
        if address is None:
            say("no Ray cluster runs: one is started on this machine and ends with this command")
        asyncio.run(_serve(plan, on, say, host_of(address)))
    return 0


async def _serve(plan: Plan, on: RayPlan, say: Callable[[str], None], host: str | None) -> None:
    keyring = read_keyring(plan)
    if keyring is None and host is None:
        say("warning: the replicas can be reached at their nodes' addresses and no API keys are set: use --api-key")
    pool = Pool([], plan.routing, names=names_of(on.most))
    replicas = make(plan, on, pool, host, keyring)
    front = GatewayPlan(
        urls=[],
        routing=plan.routing,
        host=plan.host,
        port=plan.port,
        grace=plan.grace,
        max_body=plan.max_body,
        certificate=plan.certificate,
        private_key=plan.private_key,
    )

    tasks: list[asyncio.Task[None]] = []

    async def open_replicas(pool: Pool) -> None:
        replicas.scale_to(on.least)
        await replicas.wait()
        tasks.append(asyncio.create_task(scale(replicas, on)))

    def stop_scaling() -> None:
        for task in tasks:
            task.cancel()

    try:
        await serve_pool(front, pool, keyring, say, open_replicas, stop_scaling)
    finally:
        stop_scaling()
        await replicas.close()


async def scale(replicas: Replicas, on: RayPlan) -> None:
    """Start and end replicas as the load says, if their number is a range."""
    scaling = Scaling(on.least, on.most, queued_tokens=on.queued_tokens, up_after=on.up_after, down_after=on.down_after)
    while on.least < on.most:
        await asyncio.sleep(PROBE_EVERY)
        replicas.scale_to(scaling.count(time.monotonic(), replicas.load()))


def host_of(address: str | None) -> str | None:
    """Return where the replicas of a cluster listen: on loopback if it was started here, else None: on their nodes."""
    return _LOOPBACK if address is None else None


def room_for(plan: Plan, on: RayPlan) -> int:
    """Return how many replicas the cluster has room for, one at least."""
    need, resources = need_of(plan, on, None), ray.cluster_resources()
    rooms = (resources.get(kind, 0.0) // (taken * need.ranks) for kind, taken in need.resources.items())
    return min(MOST, max(1, int(min(rooms))))


def make(plan: Plan, on: RayPlan, pool: Pool, host: str | None, keyring: Keyring | None) -> Replicas:
    """Return the replicas of a pool, none of which is started; they listen on `host`, or on their nodes' addresses."""
    need = need_of(plan, on, host)
    level = "warning" if plan.log_level == "info" else plan.log_level  # the gateway has a line for every request
    inner: Plan = msgspec.structs.replace(
        plan, keys=None, key_digest=None, certificate=None, private_key=None, log_level=level, tells_load=True
    )
    job = Job(inner, keyring, host, need.cpus)
    return Replicas(pool, msgspec.json.encode(job), need, plan.grace)


def need_of(plan: Plan, on: RayPlan, host: str | None) -> Need:
    """Return what a replica takes: a GPU for each rank where the cluster has GPUs, else CPU cores."""
    device, ranks = plan.settings.get("device") or "auto", plan.settings.get("tensor_parallel") or 1
    actors = 1 if on.ranks == "node" else ranks
    if device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0:
        return Need({"GPU": ranks / actors}, actors, on.ranks, None, host)
    return Need({"CPU": on.cpus}, actors, on.ranks, on.cpus, host)
