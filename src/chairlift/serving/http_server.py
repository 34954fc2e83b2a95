"""HttpServer: an ASGI app on the listening socket until a signal, with bounded connections; then it drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from chairlift.core.errors import SettingsError
from chairlift.engine.garbage import freeze_loaded
from chairlift.serving.connection import Connection
from chairlift.serving.listening import Acceptor, Connections, most_connections

log = logging.getLogger("chairlift")


class HttpServer:
    """Serves one app."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        closed: Callable[[str], None],
        certificate: str | None = None,
        private_key: str | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=Connection,
            ws="none",
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
            ssl_certfile=certificate,
            ssl_keyfile=private_key,
        )
        config.load()
        self._server = _Server(config)
        self._listener = listener
        self._connections = Connections(most_connections(), closed)

    def _make(self) -> Connection:
        server = self._server
        return Connection(self._connections, config=server.config, server_state=server.server_state, app_state={})

    async def run(
        self, grace: float, drain: Callable[[], None], live: Callable[[], int], close: Callable[[], Awaitable[None]]
    ) -> None:
        """Serve until SIGTERM or SIGINT, then call `drain` and finish requests within the grace time, then `close`.

        A second signal ends it at once.
        """
        server, connections, stopping = self._server, self._connections, asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            if stopping.is_set():
                server.should_exit = server.force_exit = True
            drain()
            stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        freeze_loaded()  # a full collection would otherwise pause every stream for a quarter of a second
        serving = asyncio.create_task(server.serve(sockets=[]))
        acceptor = Acceptor(self._listener, connections, self._make, server.config.ssl)
        watching = asyncio.create_task(connections.watch())
        await stopping.wait()
        log.info("draining: %d requests are in flight, new ones are rejected", live())
        end = time.monotonic() + grace
        while not (connections.is_quiet or server.should_exit) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        if live():
            log.warning("%d requests did not finish within the grace time and are aborted", live())
        await close()
        acceptor.close()
        server.should_exit = True
        await serving
        watching.cancel()


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: HttpServer drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return the listening socket, or raise a SettingsError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only for sockets made with an explicit protocol. With Nagle, a head and a body
    # in two writes reach a client 40 ms apart.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --host and --port"
        ) from None
    listener.listen(2048)
    listener.set_inheritable(True)
    return listener
