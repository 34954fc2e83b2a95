"""Crowding: the number of CPU threads of a step while other processes use the cores too.

A parallel region ends when its last thread does. A thread that shares its core with another process is not run for
milliseconds at a time, and all other threads wait for it in every region: two threads beside one busy process were four
times slower than without it, and slower than one thread. So the number of threads falls while threads wait for a core,
and is raised to the full number again after a while. One thread alone has an assistant, which uses what the other
process leaves of the second core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numba
import torch

from chairlift.ops.assistant import use_assistant

_EVERY = 0.25  # seconds between measurements
_CROWDED = 0.2  # seconds that all threads together may wait for a core, per second
_FIRST_RETRY, _LAST_RETRY = 4.0, 30.0  # seconds until all threads are used again; doubled each time they still wait
_SETTLED = 3.0  # seconds without waiting after which a retry has succeeded


def run_delay() -> float:
    """Return the seconds that this process's threads, all together, were runnable but not run; 0 if unknown."""
    total = 0
    with suppress(OSError):  # not Linux
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError, IndexError, ValueError):  # no such statistics, or a thread that has just ended
                total += int((task / "schedstat").read_bytes().split()[1])
    return total / 1e9


class Crowding:
    """Chooses the number of threads from the time that they wait for a core."""

    def __init__(
        self, most: int, clock: Callable[[], float] = time.monotonic, delay: Callable[[], float] = run_delay
    ) -> None:
        self.threads = self.most = most
        self._looking = threading.Lock()  # engines in several threads
        self._clock, self._delay = clock, delay
        self._looked_at, self._waited = clock(), delay()
        self._tried_at, self._retry = 0.0, _FIRST_RETRY
        self._is_trying = False  # whether all threads are used again, for less than _SETTLED seconds

    def look(self) -> None:
        """Choose the number of threads again, between two steps."""
        with self._looking:
            now = self._clock()
            if now - self._looked_at >= _EVERY:
                self._choose(now)

    def _choose(self, now: float) -> None:
        waited = self._delay()
        cores = (waited - self._waited) / (now - self._looked_at)
        self._looked_at, self._waited = now, waited
        before = self.threads
        if cores > _CROWDED and before > 1:
            self._retry = min(_LAST_RETRY, 2 * self._retry) if self._is_trying else _FIRST_RETRY
            self._is_trying = False
            self.threads = max(1, before - max(1, round(cores)))
            self._tried_at = now
        elif before < self.most and now - self._tried_at > self._retry:
            self.threads, self._tried_at, self._is_trying = self.most, now, True
        elif self._is_trying and now - self._tried_at > _SETTLED:
            self._is_trying = False

    def apply(self) -> None:
        """Set the number of threads of torch's operations and of our kernels."""
        torch.set_num_threads(self.threads)
        numba.set_num_threads(min(self.threads, numba.config.NUMBA_NUM_THREADS))
        use_assistant(self.threads == 1 < self.most)


_of_process: Crowding | None = None


def crowding_of_process() -> Crowding:
    """Return the one that all engines of this process share, as they share the cores and torch's number of threads.

    One of its own would take a number that another engine has lowered, now or before it was closed, for the full one.
    """
    global _of_process
    count = torch.get_num_threads()
    if _of_process is None or count not in (_of_process.threads, _of_process.most):
        _of_process = Crowding(count)
    return _of_process
