"""HttpProcess: the models of one HTTP process, with their connections to the engines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from chairlift.cluster.kv_transfer.wire import read_key
from chairlift.serving.accounts import Accounts
from chairlift.serving.app import App
from chairlift.serving.beat import Beat
from chairlift.serving.engine_client import EngineClient
from chairlift.serving.families import Families
from chairlift.serving.http_server import HttpServer
from chairlift.serving.keys import Keyring
from chairlift.serving.metrics import Metrics
from chairlift.serving.page import Page
from chairlift.serving.plan import Plan
from chairlift.serving.recording import Recording
from chairlift.serving.served import ModelParts
from chairlift.serving.service import Service
from chairlift.serving.traces import Traces

_LAG_EVERY = 0.5  # seconds between two measurements


class HttpProcess:
    """An HTTP process: its models, the app, and the server that runs it."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        listener: socket.socket,
        beats: Sequence[Beat],
        keyring: Keyring | None,
        accounts: Accounts,
    ) -> None:
        self._plan = plan
        self._listener = listener
        self._keyring = keyring
        self._families = Families(compat=plan.metrics_compat)
        names = [engine.name for engine in plan.engines]
        by_name = dict(zip(names, beats, strict=True))
        self.models = [ModelParts(plan, each, worker, by_name, self._families, accounts) for each in plan.models]
        self._traces = Traces(plan.otlp_endpoint, plan.models[0].name) if plan.otlp_endpoint else None

    @property
    def clients(self) -> list[EngineClient]:
        """The connections to all engines, in the order of the plan."""
        return [client for model in self.models for client in model.fleet.clients.values()]

    async def open(self) -> None:
        """Bind the sockets of all engines."""
        for model in self.models:
            await model.fleet.open()

    @property
    def live(self) -> int:
        """Requests in the engines."""
        return sum(model.fleet.live for model in self.models)

    async def close(self) -> None:
        """Fail all pending requests and close the sockets."""
        for model in self.models:
            await model.fleet.close()

    def _service(self) -> Service:
        served = [model.served() for model in self.models]
        return Service(
            {model.name: model for model in served},
            self._families,
            self._keyring,
            traces=self._traces,
            page=Page(served, shows_prompts=self._plan.ui_prompts) if self._plan.ui else None,
            recording=Recording.open(self._plan.record, self._plan.folder) if self._plan.record else None,
            timeout=self._plan.timeout,
            max_body=self._plan.max_body,
            role=self._plan.role,
            receives_at=self._plan.receives_at,
            tells_load=self._plan.tells_load,
            cluster_key=None if self._plan.cluster_key is None else read_key(Path(self._plan.cluster_key)),
        )

    async def run(self, on_signal: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT, then finish requests within the grace time. A second signal exits at once."""
        service, plan = self._service(), self._plan
        metrics = service.first.metrics
        server = HttpServer(
            App(service, plan.origins), self._listener, metrics.closed, plan.certificate, plan.private_key
        )

        def drain() -> None:
            service.is_draining = True
            if service.page is not None:
                service.page.close()
            on_signal()

        watching = asyncio.create_task(self._watch_lag(metrics))
        await server.run(plan.grace, drain, lambda: self.live, self.close)
        watching.cancel()
        for model in self.models:
            await model.texts.close()
        if service.recording is not None:
            await asyncio.to_thread(service.recording.close)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    async def _watch_lag(self, metrics: Metrics) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_LAG_EVERY)
            metrics.loop_lag(max(0.0, loop.time() - before - _LAG_EVERY))
