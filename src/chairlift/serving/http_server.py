"""HttpProcess: serves HTTP on the listening socket until a signal, then drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from chairlift.engine.garbage import freeze_loaded
from chairlift.serving.accounts import Accounts
from chairlift.serving.app import App
from chairlift.serving.beat import Beat
from chairlift.serving.connection import Connection
from chairlift.serving.engine_client import EngineClient
from chairlift.serving.families import Families
from chairlift.serving.keys import Keyring
from chairlift.serving.listening import Acceptor, Connections, most_connections
from chairlift.serving.metrics import Metrics
from chairlift.serving.plan import Plan
from chairlift.serving.served import ModelParts
from chairlift.serving.service import Service
from chairlift.serving.traces import Traces

log = logging.getLogger("chairlift")

_LAG_EVERY = 0.5  # seconds between two measurements


class HttpProcess:
    """An HTTP process: its models with their connections to the engines, the app and uvicorn."""

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

    @property
    def _live(self) -> int:
        return sum(model.fleet.live for model in self.models)

    async def open(self) -> None:
        """Bind the sockets of all engines."""
        for model in self.models:
            await model.fleet.open()

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
            timeout=self._plan.timeout,
            max_body=self._plan.max_body,
        )

    def _server(self, service: Service) -> _Server:
        config = uvicorn.Config(
            App(service, self._plan.origins),
            log_config=None,
            access_log=False,
            lifespan="off",
            http=Connection,
            ws="none",
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
            ssl_certfile=self._plan.certificate,
            ssl_keyfile=self._plan.private_key,
        )
        config.load()
        return _Server(config)

    def _acceptor(self, server: _Server, connections: Connections) -> Acceptor:
        def make() -> Connection:
            return Connection(connections, config=server.config, server_state=server.server_state, app_state={})

        return Acceptor(self._listener, connections, make, server.config.ssl)

    async def run(self, on_signal: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT, then finish requests within the grace time. A second signal exits at once."""
        service = self._service()
        server = self._server(service)
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            if service.is_draining:
                server.should_exit = server.force_exit = True
            service.is_draining = True
            on_signal()
            stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        freeze_loaded()  # a full collection would otherwise pause every stream for a quarter of a second
        connections = Connections(most_connections(), service.first.metrics.closed)
        serving = asyncio.create_task(server.serve(sockets=[]))
        acceptor = self._acceptor(server, connections)
        watching = [
            asyncio.create_task(self._watch_lag(service.first.metrics)),
            asyncio.create_task(connections.watch()),
        ]
        await stopping.wait()
        log.info("draining: %d requests are in flight, new ones are rejected", self._live)
        end = time.monotonic() + self._plan.grace
        while not (connections.is_quiet or server.should_exit) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        if self._live:
            log.warning("%d requests did not finish within the grace time and are aborted", self._live)
        await self.close()
        acceptor.close()
        server.should_exit = True
        await serving
        for model in self.models:
            await model.texts.close()
        for task in watching:
            task.cancel()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    async def _watch_lag(self, metrics: Metrics) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_LAG_EVERY)
            metrics.loop_lag(max(0.0, loop.time() - before - _LAG_EVERY))


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: HttpProcess drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield
