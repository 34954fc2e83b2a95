"""A further HTTP process: the same app on the same listening socket, with its own connections to the engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

import msgspec

from chairlift.serving import logs
from chairlift.serving.beat import Beat
from chairlift.serving.http_models import HttpProcess
from chairlift.serving.keys import Keyring
from chairlift.serving.plan import Plan
from chairlift.serving.served import shared_accounts
from chairlift.serving.shared import read_all
from chairlift.serving.workers import Inherited

_CHECK = 0.05  # seconds between two checks that the engines are connected


async def serve(plan: Plan, worker: int, inherited: Inherited) -> None:
    """Wait for an engine of each model, then serve until a signal or until the parent process ends."""
    keyring = msgspec.json.decode(read_all(inherited.keys), type=Keyring | None)
    accounts = shared_accounts(plan, keyring, worker, inherited.accounts)
    listener = socket.socket(fileno=inherited.listener)
    process = HttpProcess(plan, worker, listener, list(map(Beat, inherited.beats)), keyring, accounts)
    await process.open()
    watch = asyncio.create_task(_exit_with_parent(os.getppid()))
    while any(model.fleet.hello is None for model in process.models):
        await asyncio.sleep(_CHECK)
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
