"""A further HTTP process: the same app on the same listening socket, with its own line to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

import msgspec

from chairlift.serving import logs
from chairlift.serving.beat import Beat
from chairlift.serving.server import HttpProcess, Plan, read_keyring


async def serve(plan: Plan, worker: int, descriptor: int) -> None:
    """Wait for the engine, then serve until told to stop or until the first process is gone."""
    keyring = read_keyring(plan)
    process = HttpProcess(plan, worker, socket.socket(fileno=descriptor), Beat(Path(plan.folder) / "beat"), keyring)
    await process.client.open()
    watch = asyncio.create_task(_leave_with_parent(os.getppid()))
    while process.client.hello is None:
        await process.client.wait()
    with contextlib.suppress(asyncio.CancelledError):
        await process.run()
    watch.cancel()


async def _leave_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    raw, number, fd = msgspec.json.decode(sys.argv[1])
    chosen = msgspec.convert(raw, Plan)
    logs.set_up(chosen.log_format, chosen.log_level)
    asyncio.run(serve(chosen, number, fd))
