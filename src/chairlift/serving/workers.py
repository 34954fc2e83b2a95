"""Further HTTP processes on the same listening socket: the first one starts, restarts and ends them."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from chairlift.core.errors import ChairliftError
from chairlift.serving.accounts import Accounts
from chairlift.serving.beat import Beat
from chairlift.serving.keys import Keyring
from chairlift.serving.plan import Plan
from chairlift.serving.shared import nameless_file, private_folder

log = logging.getLogger("chairlift")


class Inherited(msgspec.Struct, frozen=True):
    """Descriptors that a further HTTP process inherits from the first."""

    listener: int
    beats: list[int]  # one per engine
    keys: int  # the Keyring in JSON, or null: the same in all processes, even if the key file changes
    accounts: int


class Helpers:
    """The further HTTP processes, owned by the first."""

    def __init__(
        self, plan: Plan, listener: int, beats: list[Beat], keyring: Keyring | None, accounts: Accounts
    ) -> None:
        self._plan = plan
        self._accounts = accounts
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        if plan.workers == 1:
            self._task = None
            return
        assert accounts.descriptor is not None
        keys = nameless_file(msgspec.json.encode(keyring))
        descriptors = [beat.descriptor for beat in beats]
        self._inherited = Inherited(listener, descriptors, keys, accounts.descriptor)
        self._processes = {worker: self._start(worker) for worker in range(1, plan.workers)}
        self._task = asyncio.create_task(self._watch())

    def _start(self, worker: int) -> subprocess.Popen[bytes]:
        argument = msgspec.json.encode([self._plan, worker, self._inherited]).decode()
        command = [sys.executable, "-m", "chairlift.serving.http_process", argument]
        given = self._inherited
        descriptors = (given.listener, *given.beats, given.keys, given.accounts)
        return subprocess.Popen(command, pass_fds=descriptors, start_new_session=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for worker, process in self._processes.items():
                if process.poll() is not None:
                    log.error("HTTP process %d ended with code %s; it is started again", worker, process.returncode)
                    self._accounts.clear(worker)
                    try:
                        folder = Path(self._plan.folder)  # a cleaner of /tmp may have removed it
                        private_folder(folder)
                        (folder / "metrics").mkdir(exist_ok=True)
                        self._processes[worker] = self._start(worker)
                    except (OSError, ChairliftError) as error:  # retried in the next iteration
                        log.error("HTTP process %d cannot be started: %s", worker, error)

    def drain(self) -> None:
        """Send SIGTERM: they drain; a second one ends them at once."""
        if self._task is not None:
            self._task.cancel()
        for process in self._processes.values():
            process.terminate()

    async def stop(self) -> None:
        """Wait until they have ended, for 5 s longer than their grace time; then kill them."""
        end = time.monotonic() + self._plan.grace + 5
        for process in self._processes.values():
            try:
                await asyncio.to_thread(process.wait, max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
