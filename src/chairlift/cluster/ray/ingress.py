"""The Ray Serve application: a deployment with the gateway as its ASGI app, which starts the replicas as actors.

Serve starts the ingress, restarts it and gives it HTTP requests; what happens with a request is the gateway's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec
from ray import serve
from ray.serve import Application

from chairlift.cluster.ray.replicas import names_of
from chairlift.cluster.ray.serve import RayPlan, make, scale
from chairlift.core.errors import SettingsError
from chairlift.core.settings import CacheSettings, ModelSettings, SchedulingSettings, options
from chairlift.gateway.app import Gateway
from chairlift.gateway.pool import Pool
from chairlift.routing.scaling import read_counts
from chairlift.serving import logs
from chairlift.serving.plan import ModelPlan, Plan
from chairlift.serving.server import read_keyring

_REQUESTS = 100_000  # at once in the ingress: its limits are those of the replicas and of tenants
_GRACE = 30.0


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of the application besides the engine's settings, named as the flags of `chairlift serve`."""

    model: str = "smollm2-135m"
    served_model_name: str | None = None
    replicas: str | int = "1"
    replica_cpus: float = 1.0
    rank_placement: str = "node"
    queued_tokens: int = 8192
    routing: str = "cache-aware"
    api_keys: str | None = None  # file; CHAIRLIFT_API_KEYS is also read
    kv_store: str | None = None
    grace: float = _GRACE


def build(given: Mapping[str, Any]) -> Application:
    """Return the application for `serve run chairlift.cluster.ray:app model=... replicas=1..4`."""
    plan, on = plan_of(given)
    made = _deployment().options(graceful_shutdown_timeout_s=plan.grace)
    return made.bind(msgspec.json.encode((plan, on)))


def plan_of(given: Mapping[str, Any]) -> tuple[Plan, RayPlan]:
    """Read the arguments; values may be text, as on a command line.

    >>> plan, on = plan_of({"model": "smollm2-135m", "replicas": "1..4", "tensor_parallel": "2"})
    >>> on.least, on.most, plan.settings
    (1, 4, {'tensor_parallel': 2})
    """
    types: dict[str, Any] = {}
    for group in (ModelSettings, CacheSettings, SchedulingSettings):
        types |= get_type_hints(group)
    names = {found.name for _, found in options()}
    try:
        settings = {
            name: msgspec.convert(value, types[name], strict=False) for name, value in given.items() if name in names
        }
        rest = {name: value for name, value in given.items() if name not in names}
        found = msgspec.convert(rest, Arguments, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"the arguments of the application cannot be read: {error}") from None
    least, most = read_counts(str(found.replicas))
    plan = Plan(
        [ModelPlan(found.served_model_name or found.model, found.model)],
        settings,
        routing=found.routing,
        keys=found.api_keys,
        kv_store=found.kv_store,
        grace=found.grace,
        ui=False,
    )
    plan.scheduling  # noqa: B018  # rejects a wrong value before anything is started
    return plan, RayPlan(least or 1, most or 1, found.replica_cpus, found.rank_placement, found.queued_tokens)


class Ingress:
    """The gateway in a Serve replica. The actors of the replicas belong to it and end with it."""

    async def __init__(self, raw: bytes) -> None:  # type: ignore[misc]  # Serve awaits it
        plan, on = msgspec.json.decode(raw, type=tuple[Plan, RayPlan])
        logs.set_up("json", plan.log_level)
        pool = Pool([], plan.routing, names=names_of(on.most))
        keyring = read_keyring(plan)
        self.gateway = Gateway(pool, keyring, plan.max_body)
        replicas = make(plan, on, pool, None, keyring)
        replicas.scale_to(on.least)
        await replicas.wait()
        self._scaling = asyncio.create_task(scale(replicas, on))


def _door() -> Any:
    """Return the ASGI app; Serve makes it apart from the object that has the gateway."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        ingress: Any = serve.get_replica_context().servable_object
        await ingress.gateway(scope, receive, send)

    return app


def _deployment() -> Any:
    made = serve.deployment(name="chairlift", num_replicas=1, max_ongoing_requests=_REQUESTS)
    return made(serve.ingress(_door)(Ingress))
