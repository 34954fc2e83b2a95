"""A further HTTP process: the same app on the same listening socket, with its own connection to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

import msgspec

from chairlift.serving import logs
from chairlift.serving.accounts import Accounts
from chairlift.serving.beat import Beat
from chairlift.serving.keys import Keyring
from chairlift.serving.plan import Plan
from chairlift.serving.server import HttpProcess, tenants_of
from chairlift.serving.shared import read_all
from chairlift.serving.workers import Inherited


async def serve(plan: Plan, worker: int, inherited: Inherited) -> None:
    """Wait for the engine, then serve until a signal or until the parent process ends."""
    keyring = msgspec.json.decode(read_all(inherited.keys), type=Keyring | None)
    accounts = Accounts.shared(tenants_of(keyring), plan.workers, worker, inherited.accounts)
    listener = socket.socket(fileno=inherited.listener)
    process = HttpProcess(plan, worker, listener, Beat(inherited.beat), keyring, accounts)
    await process.client.open()
    watch = asyncio.create_task(_exit_with_parent(os.getppid()))
    while process.client.hello is None:
        await process.client.wait()
    with contextlib.suppress(asyncio.CancelledError):
        await process.run()
    watch.cancel()


async def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    chosen, number, descriptors = msgspec.json.decode(sys.argv[1], type=tuple[Plan, int, Inherited])
    logs.set_up(chosen.log_format, chosen.log_level)
    asyncio.run(serve(chosen, number, descriptors))
