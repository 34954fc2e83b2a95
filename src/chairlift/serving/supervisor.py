"""Supervisor: starts the engine process, and restarts it when it ends or hangs."""

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
from chairlift.serving.engine_start import Job

log = logging.getLogger("chairlift")

ENGINE = [sys.executable, "-m", "chairlift.serving.engine_process"]
FIRST_WAIT, LONGEST_WAIT = 0.2, 10.0  # seconds from an end to the next start; doubled if the engine ends again soon
_LASTED = 10.0  # seconds; an engine that ran for longer did not fail at start, so the wait is reset
_GIVEN_UP = 2.5  # multiple of the beat's patience after which a silent engine is killed
_CHECK_EVERY = 0.25  # seconds between two checks


class Supervisor:
    """Owner of the engine process."""

    def __init__(self, job: Job, beat: Beat, command: list[str] | None = None) -> None:
        self.restarts = 0
        self._job = job
        self._beat = beat
        self._command = command or ENGINE
        self._wait, self._begun, self._has_beaten = FIRST_WAIT, time.monotonic(), False
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the engine and the task that watches it."""
        self._launch()
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """End the engine: SIGTERM first, SIGKILL after 3 s."""
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
        """The engine's exit code, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def _launch(self) -> None:
        # In its own session, a terminal's Ctrl-C does not reach it: the server drains first, then ends it.
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
        """Check the engine until cancelled; no error may end this task, or the engine would not be restarted."""
        while True:
            await asyncio.sleep(_CHECK_EVERY)
            try:
                await self._check()
            except Exception as error:
                log.error("the engine process could not be checked or restarted: %s", error)
                await asyncio.sleep(self._wait)

    async def _check(self) -> None:
        assert self._process is not None
        now = time.monotonic()
        code = self._process.poll()
        if code is None:
            # While the engine loads its model it has no beat: there is no time limit for that.
            silence = self._beat.silence(now)
            self._has_beaten = self._has_beaten or silence < now - self._begun
            if self._has_beaten and silence > _GIVEN_UP * self._beat.patience:
                log.error("the engine has had no heartbeat for %.1f s and is killed", silence)
                self._kill()
            return
        self._wait = FIRST_WAIT if now - self._begun > _LASTED else self._wait
        log.error("the engine process ended with code %s; it is started again in %.1f s", code, self._wait)
        await asyncio.sleep(self._wait)
        self._wait = min(LONGEST_WAIT, 2 * self._wait)
        self._launch()
        self.restarts += 1
