"""Watch: the thread that starts the processes of ranks 1 and up, and notices when one ends or hangs.

Then it kills all of them, so that rank 0 does not wait for ever in a sum: an engine without one rank cannot run
another step. The processes end with the thread, whatever ends it (die_with_parent in rank_process.py).
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chairlift.cluster.tensor_parallel.memory import Board
from chairlift.cluster.tensor_parallel.remote import RemoteProcess
from chairlift.core.errors import DeviceError

log = logging.getLogger("chairlift")

# Seconds for which no rank begins an operation between ranks while a step runs. A layer has two of these: even a prompt
# on a slow CPU has one in far less time. Less than the server's patience with an engine: the log then names the rank.
STALLED = 8.0
_LOOK_EVERY = 0.25  # seconds
_TOGETHER = 0.1  # seconds in which ranks that fail because of each other end, so that the first cause is known
_CLOSING = 3.0  # seconds for the processes to end by themselves


@dataclass(slots=True)
class RankProcess:
    """The command of one rank's process, and the process once it runs."""

    rank: int
    command: list[str]
    environment: dict[str, str]
    descriptors: list[int]  # that it inherits; they are closed here once it runs
    reports: int  # the reading end of a pipe that the process alone writes to
    process: subprocess.Popen[bytes] | RemoteProcess | None = None  # one on another host runs from the beginning
    heard: bytes = b""
    said: list[dict[str, Any]] = field(default_factory=list)


class Watch:
    """Starts, watches and ends the rank processes."""

    def __init__(self, processes: list[RankProcess], board: Board, on_fault: Callable[[str], None]) -> None:
        self.fault: str | None = None  # why no further step can run
        self._processes, self._board, self._on_fault = processes, board, on_fault
        self._size = len(processes) + 1
        self._busy_since = 0.0  # 0: no step runs
        self._seen, self._moved_at = board.read(), 0.0
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="chairlift-ranks", daemon=True)
        self._thread.start()

    # ---- called by the engine's thread

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1 and up, in order."""
        return [each.process.pid for each in self._processes if each.process is not None]

    def begin(self) -> None:
        """Note that a step runs: from now on the ranks must make progress."""
        self._busy_since = time.monotonic()

    def end(self) -> None:
        """Note that no step runs."""
        self._busy_since = 0.0

    def wait_for(self, key: str) -> list[Any]:
        """Wait until every rank has reported `key`; return what they reported. DeviceError if a rank has ended."""
        with self._changed:
            while True:
                found = [next((said[key] for said in each.said if key in said), None) for each in self._processes]
                if None not in found:
                    return found
                if self.fault is not None:
                    raise DeviceError(self.fault)
                self._changed.wait(_LOOK_EVERY)

    def wait_for_fault(self) -> str | None:
        """Return why a rank has ended, for a caller that has lost its connection to one; None if none has."""
        with self._changed:
            self._changed.wait_for(lambda: self.fault is not None, 2 * (_LOOK_EVERY + _TOGETHER))
            return self.fault

    def fail(self, reason: str) -> None:
        """End all processes because no further step can run."""
        with self._changed:
            if self.fault is not None or self._is_closing:
                return
            self.fault = reason
            self._changed.notify_all()
        self._kill()
        self._on_fault(reason)

    def expect_end(self) -> None:
        """Note that the processes are about to end by themselves."""
        self._is_closing = True

    def close(self) -> None:
        """Wait until the processes have ended; kill those that do not end by themselves."""
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSING + 1)

    # ---- the thread

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for each in self._processes:
                    self._start(each)
                    selector.register(each.reports, selectors.EVENT_READ, each)
                self._watch(selector)
        except Exception as error:
            log.exception("the ranks cannot be watched")
            self.fail(f"the ranks cannot be watched: {error}")
        finally:
            self._kill()
            for each in self._processes:
                os.close(each.reports)
                if each.process is not None:
                    each.process.wait()

    def _start(self, each: RankProcess) -> None:
        if each.process is not None:
            return
        each.process = subprocess.Popen(
            each.command,
            env=each.environment,
            pass_fds=each.descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for descriptor in each.descriptors:
            os.close(descriptor)

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Read reports until all processes have ended."""
        deadline = 0.0
        while selector.get_map():
            for key, _ in selector.select(_LOOK_EVERY):
                if not self._hear(key.data):
                    selector.unregister(key.fd)
                    self._note_end()
            now = time.monotonic()
            if self._is_closing:
                deadline = deadline or now + _CLOSING
                if now > deadline:
                    self._kill()
            elif self.fault is None and self._is_stalled(now):
                self.fail(silence_of(self._board.read(), STALLED))

    def _hear(self, each: RankProcess) -> bool:
        """Read a rank's reports; return whether its process still runs."""
        try:
            arrived = os.read(each.reports, 1 << 16)
        except OSError:  # of the connection to a rank on another host
            return False
        if not arrived:
            return False
        *lines, each.heard = (each.heard + arrived).split(b"\n")
        with self._changed:
            for said in map(json.loads, lines):
                if "at" in said:
                    self._board.put(each.rank, said["at"])
                else:
                    each.said.append(said)
            self._changed.notify_all()
        return True

    def _note_end(self) -> None:
        if self.fault is not None or self._is_closing:
            return
        time.sleep(_TOGETHER)
        self.fail(self._first_cause())

    def _first_cause(self) -> str:
        """Return why the ranks have ended: one that was killed or that failed by itself, not one that lost another."""
        causes = []
        for each in self._processes:
            assert each.process is not None
            code = each.process.poll()
            if code is None:
                continue
            self._hear(each)
            name = f"rank {each.rank} of {self._size}"
            errors = [said["error"] for said in each.said if "error" in said]
            lost = [said["lost"] for said in each.said if "lost" in said]
            if errors:
                causes.append((0, f"{name}: {errors[0]}"))
            elif lost:
                causes.append((2, f"{name}: {lost[0]}"))
            elif isinstance(each.process, RemoteProcess):
                causes.append((1, f"{name}: its process or its host has ended"))
            else:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                causes.append((1, f"{name} {how}"))
        return min(causes)[1] if causes else "a rank has ended"

    def _is_stalled(self, now: float) -> bool:
        counters, since = self._board.read(), self._busy_since
        if counters != self._seen or not since:
            self._seen, self._moved_at = counters, now
            return False
        return now - max(self._moved_at, since) > STALLED

    def _kill(self) -> None:
        for each in self._processes:
            if each.process is not None and each.process.poll() is None:
                each.process.kill()


def silence_of(counters: list[int], seconds: float) -> str:
    """Name the ranks that are furthest behind; all that are equally far, since any of them may be the cause.

    >>> silence_of([7, 6], 8)
    'rank 1 of 2 has not answered for 8 s'
    >>> silence_of([6, 6, 7, 6], 8)
    'ranks 0, 1 and 3 of 4 have not answered for 8 s'
    """
    *others, last = [str(rank) for rank, count in enumerate(counters) if count == min(counters)]
    named = f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
    return f"{named} of {len(counters)} {'have' if others else 'has'} not answered for {seconds:.0f} s"
