"""Start of the gateway: from its settings to a server that runs until a signal."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from chairlift.cluster.kv_transfer.wire import read_key
from chairlift.gateway.app import Gateway
from chairlift.gateway.pool import Pool
from chairlift.serving import logs
from chairlift.serving.http_server import HttpServer, listen
from chairlift.serving.keys import Keyring
from chairlift.serving.listening import allow_files


class GatewayPlan(msgspec.Struct, frozen=True):
    """The settings of the gateway, from the command line."""

    urls: list[str]
    routing: str = "cache-aware"
    host: str = "127.0.0.1"
    port: int = 8080
    keys: str | None = None
    cluster_key: str | None = None
    grace: float = 30.0
    max_body: int = 8 << 20
    certificate: str | None = None
    private_key: str | None = None
    log_format: str = "auto"
    log_level: str = "info"


async def serve(plan: GatewayPlan, say: Callable[[str], None]) -> int:
    """Serve until a signal; return the exit code."""
    keyring = Keyring.read(Path(plan.keys), os.environ) if plan.keys else None
    key = None if plan.cluster_key is None else read_key(Path(plan.cluster_key))
    await serve_pool(plan, Pool(plan.urls, plan.routing, key), keyring, say, lambda pool: pool.open())
    return 0


async def serve_pool(
    plan: GatewayPlan,
    pool: Pool,
    keyring: Keyring | None,
    say: Callable[[str], None],
    open_servers: Callable[[Pool], Awaitable[None]],
    on_drain: Callable[[], None] = lambda: None,
) -> None:
    """Serve the servers of a pool until a signal; `open_servers` ends when some of them can be used.

    `on_drain` is called at the signal, before the last requests end.
    """
    for warning in keyring.warnings if keyring else []:
        say(f"warning: {warning}")
    listener = listen(plan.host, plan.port)
    gateway = Gateway(pool, keyring, plan.max_body)
    await open_servers(pool)
    server = HttpServer(gateway, listener, lambda reason: None, plan.certificate, plan.private_key)
    host = f"[{plan.host}]" if ":" in plan.host else plan.host
    scheme = "https" if plan.certificate else "http"
    states = "".join(
        f"  server     {name} ({each.trouble or each.role.replace('both', 'ok')})\n"
        for name, each in pool.backends.items()
    )
    say(
        f"\n{states}  routing    {plan.routing}\n"
        f"  address    {scheme}://{host}:{listener.getsockname()[1]}/v1   (health: /health, metrics: /metrics)\n"
    )

    def drain() -> None:
        gateway.is_draining = True
        on_drain()

    await server.run(plan.grace, drain, lambda: pool.live, pool.close)


def run(plan: GatewayPlan, say: Callable[[str], None]) -> int:
    """Run the gateway and return its exit code."""
    logs.set_up(plan.log_format, plan.log_level)
    allow_files()
    return asyncio.run(serve(plan, say))
