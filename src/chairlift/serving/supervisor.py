"""Supervisor: keeps the engine process running, and starts it again when it dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time

import msgspec

from chairlift.serving.beat import Beat
from chairlift.serving.engine_process import Job

log = logging.getLogger("chairlift")

ENGINE = [sys.executable, "-m", "chairlift.serving.engine_process"]
FIRST_WAIT, LONGEST_WAIT = 0.2, 10.0  # seconds between a death and the next start; doubled with each that follows soon
_LASTED = 10.0  # an engine that lived for so long did not fail at start: the wait begins anew
_GIVEN_UP = 2.5  # times the patience, after which an engine that hangs is killed
_LOOK = 0.25  # seconds between two looks


class Supervisor:
    """Owns the engine process."""

    def __init__(self, job: Job, beat: Beat, command: list[str] | None = None) -> None:
        self.restarts = 0
        self._job = job
        self._beat = beat
        self._command = command or ENGINE
        self._wait, self._begun, self._has_beaten = FIRST_WAIT, time.monotonic(), False
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the engine, and watch it from now on."""
        self._launch()
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """End the engine: asked first, killed if it does not listen."""
        if self._task is not None:
            self._task.cancel()
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, 3)
        except subprocess.TimeoutExpired:
            self._kill()
            await asyncio.to_thread(self._process.wait)

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How the engine ended, if it has."""
        return None if self._process is None else self._process.poll()

    def _launch(self) -> None:
        # A session of its own: a terminal's Ctrl-C is for us, and we end it in order.
        job = msgspec.json.encode(self._job).decode()
        self._process = subprocess.Popen(
            [*self._command, job],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            pass_fds=[self._beat.descriptor],
        )
        self._begun, self._has_beaten = time.monotonic(), False

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _watch(self) -> None:
        """Look after the engine for ever: no error may end this, or a dead engine would stay dead."""
        while True:
            await asyncio.sleep(_LOOK)
            try:
                await self._look()
            except Exception as error:
                log.error("the engine process could not be looked after: %s", error)
                await asyncio.sleep(self._wait)

    async def _look(self) -> None:
        assert self._process is not None
        now = time.monotonic()
        code = self._process.poll()
        if code is None:
            # While it loads its model it has no beat, and takes as long as it takes.
            silence = self._beat.silence(now)
            self._has_beaten = self._has_beaten or silence < now - self._begun
            if self._has_beaten and silence > _GIVEN_UP * self._beat.patience:
                log.error("the engine has been silent for %.1f s and is killed", silence)
                self._kill()
            return
        self._wait = FIRST_WAIT if now - self._begun > _LASTED else self._wait
        log.error("the engine process ended with code %s; it is started again in %.1f s", code, self._wait)
        await asyncio.sleep(self._wait)
        self._wait = min(LONGEST_WAIT, 2 * self._wait)
        self._launch()
        self.restarts += 1
