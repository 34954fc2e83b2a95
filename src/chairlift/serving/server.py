"""The server: starts the HTTP processes and the engine process, serves, and drains on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import msgspec
import uvicorn

from chairlift.core.errors import ChairliftError, SettingsError
from chairlift.core.settings import SchedulingSettings
from chairlift.engine.garbage import freeze_loaded
from chairlift.models.checkpoint import Checkpoint, open_checkpoint
from chairlift.models.sources import resolve
from chairlift.offline.defaults import SamplingDefaults, read_defaults
from chairlift.offline.vocabulary import read_tokenizer
from chairlift.serving import logs
from chairlift.serving.accounts import Accounts
from chairlift.serving.admission import Admission
from chairlift.serving.app import App
from chairlift.serving.asking import Reader
from chairlift.serving.beat import Beat
from chairlift.serving.connection import Connection
from chairlift.serving.engine_client import EngineClient
from chairlift.serving.engine_process import Job
from chairlift.serving.keys import Keyring
from chairlift.serving.listening import Acceptor, Connections, allow_files, most_connections
from chairlift.serving.messages import Hello
from chairlift.serving.metrics import Metrics
from chairlift.serving.plan import Plan
from chairlift.serving.service import Service
from chairlift.serving.supervisor import Supervisor
from chairlift.serving.text_pool import TextPool
from chairlift.serving.traces import Traces
from chairlift.serving.workers import Helpers
from chairlift.text.message import Family

log = logging.getLogger("chairlift")

WAITING_TOKENS = 1 << 20  # prompt tokens; each takes some 70 bytes in both processes together
_LAG_EVERY = 0.5  # seconds between two measurements


async def serve(plan: Plan, say: Callable[[str], None]) -> int:
    """Serve until a signal; return the exit code."""
    keyring = read_keyring(plan)
    for warning in keyring.warnings if keyring else []:
        say(f"warning: {warning}")
    if keyring is None and plan.host not in ("127.0.0.1", "::1", "localhost"):
        say(f"warning: {plan.host} can be reached from other machines and no API keys are set: use --api-key")
    if keyring is None and plan.scheduling.policy == "fair":
        say("warning: the fair policy shares among the tenants of API keys, and no keys are set: it works like fcfs")
    listener = listen(plan.host, plan.port)
    plan = msgspec.structs.replace(plan, port=listener.getsockname()[1])
    with runtime_folder() as folder:
        plan = msgspec.structs.replace(plan, folder=str(folder))
        if plan.workers > 1:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder / "metrics")
            (folder / "metrics").mkdir()
        beat = Beat()
        sockets = [plan.socket_of(worker) for worker in range(plan.workers)]
        job = Job(plan.model, plan.settings, sockets, beat.descriptor, os.getpid(), progress=sys.stderr.isatty())
        supervisor = Supervisor(job, beat, plan.engine_command)
        accounts = Accounts() if plan.workers == 1 else Accounts.shared(tenants_of(keyring), plan.workers)
        process = HttpProcess(plan, 0, listener, beat, keyring, accounts)
        await process.client.open()
        supervisor.start()
        try:
            await first_hello(process.client, supervisor)
            helpers = Helpers(plan, listener.fileno(), beat, keyring, accounts)
            for warning in process.defaults.warnings:
                say(f"warning: {warning}")
            say(banner(plan, process.client.hello, process.defaults, has_keys=keyring is not None))
            with contextlib.suppress(asyncio.CancelledError):
                await process.run(on_signal=helpers.drain)
            await helpers.stop()
        finally:
            await process.client.close()
            await supervisor.stop()
    return 0


async def first_hello(client: EngineClient, supervisor: Supervisor) -> None:
    """Wait until the engine has loaded the model; raise a ChairliftError if it cannot."""
    while client.hello is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.wait(), 0.2)
        if client.broken is not None:
            raise ChairliftError(client.broken)
        if supervisor.restarts or (supervisor.exit_code or 0) > 3 or (supervisor.exit_code or 0) < 0:
            raise ChairliftError("the engine process ended while it loaded the model: see the log above")


def read_keyring(plan: Plan) -> Keyring | None:
    """Return the API keys; None if the server needs none."""
    return Keyring.read(Path(plan.keys) if plan.keys else None, os.environ, plan.key_digest)


def tenants_of(keyring: Keyring | None) -> list[str]:
    """Return the tenants' names, in an order that is the same in every process."""
    return sorted({entry.tenant.name for entry in keyring.entries}) if keyring else []


def banner(plan: Plan, hello: Hello | None, defaults: SamplingDefaults, *, has_keys: bool) -> str:
    """Return the text that is printed when the server is ready."""
    assert hello is not None
    scheme = "https" if plan.certificate else "http"
    host = f"[{plan.host}]" if ":" in plan.host else plan.host
    address = f"{scheme}://{'127.0.0.1' if plan.host == '0.0.0.0' else host}:{plan.port}"
    key = ' -H "Authorization: Bearer $KEY"' if has_keys else ""
    chosen = choices(plan.scheduling)
    scheduling = f"  scheduling {chosen}\n" if chosen else ""
    return (
        f"\n  model      {plan.name} ({hello.dtype} on {hello.device})\n"
        f"  KV cache   {hello.capacity}\n"
        f"  batch      up to {hello.max_sequences} sequences, {hello.step_tokens:,} tokens a step\n"
        f"{scheduling}"
        f"  sampling   {defaults}\n"
        f"  address    {address}/v1   (health: /health, metrics: /metrics)\n\n"
        f"  try it:\n"
        f"  curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 64}}\'\n'
    )


def choices(scheduling: SchedulingSettings) -> str:
    """Return the scheduling settings that differ from their defaults, except the sizes of batch and step.

    >>> choices(SchedulingSettings(policy="sjf", target_tpot=0.05))
    'target-tpot 0.05 s, policy sjf'
    """
    found = []
    for field in fields(scheduling):
        value = getattr(scheduling, field.name)
        if value != field.default and field.name not in ("max_sequences", "step_tokens"):
            shown = f"{value:g} s" if field.metadata.get("is_time") else value
            found.append(f"{field.name.replace('_', '-')} {shown}")
    return ", ".join(found)


class HttpProcess:
    """An HTTP process: its connection to the engine, the app and uvicorn."""

    def __init__(
        self,
        plan: Plan,
        number: int,
        listener: socket.socket,
        beat: Beat,
        keyring: Keyring | None,
        accounts: Accounts,
    ) -> None:
        self._plan = plan
        self._listener = listener
        self._keyring = keyring
        self._accounts = accounts
        self._metrics = Metrics(plan.name, compat=plan.metrics_compat, scheduling=plan.scheduling)
        self.client = EngineClient(plan.socket_of(number), beat, self._metrics.of_engine())
        self._traces = Traces(plan.otlp_endpoint, plan.name) if plan.otlp_endpoint else None
        checkpoint = checkpoint_of(plan)
        self.defaults = read_defaults(checkpoint, plan.sampling)
        tokenizer, missing = read_tokenizer(checkpoint)
        self._texts = TextPool(tokenizer)
        self._texts.start()  # in parallel with the engine's loading of the model
        template = None if tokenizer is None else tokenizer.chat_template
        family = Family.of(template, plan.tool_parser)
        self._reader = Reader(plan.name, tokenizer, missing, self.defaults.values, pool=self._texts, family=family)

    def _service(self, hello: Hello) -> Service:
        plan = self._plan
        tokens = plan.max_waiting_tokens or max(WAITING_TOKENS, hello.kv_tokens)
        # Each HTTP process has its share of the queue's bounds; tenants' limits are counted across processes.
        admission = Admission(
            max(1, plan.max_waiting // plan.workers),
            max(1, tokens // plan.workers),
            plan.max_wait,
            accounts=self._accounts,
            is_busy=lambda: self.client.is_busy,
        )
        return Service(
            plan.name,
            self.client,
            self._reader,
            self._metrics,
            admission,
            self._keyring,
            traces=self._traces,
            timeout=plan.timeout,
            max_body=plan.max_body,
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
        assert self.client.hello is not None, "the engine must be connected first"
        service = self._service(self.client.hello)
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
        connections = Connections(most_connections(), self._metrics.closed)
        serving = asyncio.create_task(server.serve(sockets=[]))
        acceptor = self._acceptor(server, connections)
        watching = [asyncio.create_task(self._watch_lag()), asyncio.create_task(connections.watch())]
        await stopping.wait()
        log.info("draining: %d requests are in flight, new ones are rejected", self.client.live)
        end = time.monotonic() + self._plan.grace
        while not (connections.is_quiet or server.should_exit) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        if self.client.live:
            log.warning("%d requests did not finish within the grace time and are aborted", self.client.live)
        await self.client.close()
        acceptor.close()
        server.should_exit = True
        await serving
        await self._texts.close()
        for task in watching:
            task.cancel()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    async def _watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_LAG_EVERY)
            self._metrics.loop_lag(max(0.0, loop.time() - before - _LAG_EVERY))


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: HttpProcess drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def checkpoint_of(plan: Plan) -> Checkpoint | None:
    """Return the model's files, of which an HTTP process reads all but the weights; None for dummy weights."""
    if plan.settings.get("load_format") == "dummy":
        return None
    return open_checkpoint(resolve(plan.model, progress=False))


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


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """Make a private folder for sockets and remove it afterwards; a socket's path may have some 100 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="chairlift-", dir="/tmp" if Path("/tmp").is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(plan: Plan, say: Callable[[str], None]) -> int:
    """Run the server and return its exit code."""
    logs.set_up(plan.log_format, plan.log_level)
    allow_files()
    return asyncio.run(serve(plan, say))
