"""The server: starts the HTTP processes and the engine processes, serves, and drains on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import msgspec

from chairlift.core.errors import ChairliftError
from chairlift.core.settings import SchedulingSettings
from chairlift.serving import logs
from chairlift.serving.beat import Beat
from chairlift.serving.engine_client import EngineClient
from chairlift.serving.engine_start import Job
from chairlift.serving.http_models import HttpProcess
from chairlift.serving.http_server import listen
from chairlift.serving.keys import Keyring
from chairlift.serving.listening import allow_files
from chairlift.serving.plan import EnginePlan, Plan
from chairlift.serving.recording import make_key
from chairlift.serving.served import ModelParts, shared_accounts
from chairlift.serving.supervisor import Supervisor
from chairlift.serving.workers import Helpers


async def serve(
    plan: Plan,
    say: Callable[[str], None],
    keyring: Keyring | None,
    listener: socket.socket | None = None,
) -> int:
    """Serve until a signal; return the exit code. A listening socket may be given by the caller."""
    for warning in keyring.warnings if keyring else []:
        say(f"warning: {warning}")
    if keyring is None and plan.host not in ("127.0.0.1", "::1", "localhost"):
        say(f"warning: {plan.host} can be reached from other machines and no API keys are set: use --api-key")
    if keyring is None and plan.scheduling.policy == "fair":
        say("warning: the fair policy shares among the tenants of API keys, and no keys are set: it works like fcfs")
    listener = listener or listen(plan.host, plan.port)
    plan = msgspec.structs.replace(plan, port=listener.getsockname()[1])
    with runtime_folder() as folder:
        plan = msgspec.structs.replace(plan, folder=str(folder))
        if plan.workers > 1:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder / "metrics")
            (folder / "metrics").mkdir()
        if plan.record is not None:
            make_key(plan.folder)
        beats = [Beat() for _ in plan.engines]
        supervisors = [
            Supervisor(job_of(plan, engine, beat), beat, plan.engine_command)
            for engine, beat in zip(plan.engines, beats, strict=True)
        ]
        accounts = shared_accounts(plan, keyring)
        process = HttpProcess(plan, 0, listener, beats, keyring, accounts)
        await process.open()
        for supervisor in supervisors:
            supervisor.start()
        try:
            for client, supervisor in zip(process.clients, supervisors, strict=True):
                await first_hello(client, supervisor)
            helpers = Helpers(plan, listener.fileno(), beats, keyring, accounts)
            for warning in dict.fromkeys(text for model in process.models for text in model.defaults.warnings):
                say(f"warning: {warning}")
            say(banner(plan, process.models, has_keys=keyring is not None))
            with contextlib.suppress(asyncio.CancelledError):
                await process.run(on_signal=helpers.drain)
            await helpers.stop()
        finally:
            await process.close()
            await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))
    return 0


def job_of(plan: Plan, engine: EnginePlan, beat: Beat) -> Job:
    """Return the arguments of an engine process."""
    return Job(
        engine.model.model,
        plan.settings,
        [plan.socket_of(worker, engine) for worker in range(plan.workers)],
        beat.descriptor,
        os.getpid(),
        progress=sys.stderr.isatty(),
        place=engine.place,
        engines=len(plan.engines),
        lock=f"{plan.folder}/memory.lock",
        receives_at=[
            *([plan.kv_address_of(engine)] if plan.roles and engine.role != "prefill" else []),
            *([plan.receives_at] if plan.receives_at else []),
        ],
        sends=engine.role != "decode" if plan.roles else plan.role != "both",
        cluster_key=plan.cluster_key,
        kv_store=plan.kv_store,
        remote=plan.remote,
    )


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


def banner(plan: Plan, models: list[ModelParts], *, has_keys: bool) -> str:
    """Return the text that is printed when the server is ready."""
    scheme = "https" if plan.certificate else "http"
    host = f"[{plan.host}]" if ":" in plan.host else plan.host
    address = f"{scheme}://{'127.0.0.1' if plan.host == '0.0.0.0' else host}:{plan.port}"
    key = ' -H "Authorization: Bearer $KEY"' if has_keys else ""
    chosen = choices(plan.scheduling)
    scheduling = f"  scheduling {chosen}\n" if chosen else ""
    apart = f" ({', '.join(plan.roles)})" if plan.roles else ""
    replicas = (
        f"  replicas   {plan.replicas} of each model{apart}, routing {plan.routing}\n" if plan.replicas > 1 else ""
    )
    page = f"  live page  {address}/\n" if plan.ui else ""
    named = f'"model": "{models[0].name}", ' if len(models) > 1 else ""
    return (
        f"\n{''.join(map(model_lines, models))}"
        f"{replicas}"
        f"{scheduling}"
        f"  address    {address}/v1   (health: /health, metrics: /metrics)\n"
        f"{page}\n"
        f"  try it:\n"
        f"  curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{{named}"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 64}}\'\n'
    )


def model_lines(model: ModelParts) -> str:
    """Return the lines of one model, with the limits of one of its engines."""
    hello = model.fleet.hello
    assert hello is not None
    return (
        f"  model      {model.name} ({hello.dtype} on {hello.device})\n"
        f"  weights    {hello.weights} read by each step\n"
        f"  KV cache   {hello.capacity}\n"
        f"  batch      up to {hello.max_sequences} sequences, {hello.step_tokens:,} tokens a step\n"
        f"  sampling   {model.defaults}\n"
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
    return asyncio.run(serve(plan, say, read_keyring(plan)))
