"""Compiler: compiles the grammars of requests in threads of the engine process, so that no step waits for one."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread, get_native_id
from typing import NamedTuple

from chairlift.core.constraint import Constraint
from chairlift.core.errors import ChairliftError, RequestError
from chairlift.text.grammar import Grammars

_THREADS = 2
_NICE = 10


def run_behind_others() -> None:
    """Lower the priority of this thread, so that steps do not wait for a core."""
    with suppress(OSError):  # elsewhere than on Linux, threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICE)


class Compiled(NamedTuple):
    """A request's constraint, or the reason why there is none."""

    name: str
    found: Constraint | Exception


class Compiler:
    """Compiles grammars, in order; `reader` becomes readable when one is ready."""

    def __init__(self, make: Callable[[], Grammars]) -> None:
        self.grammars: Grammars | None = None
        self._problem: Exception | None = None
        self._make = make
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammars", initializer=run_behind_others)
        self._done: deque[Compiled] = deque()
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)

    def prepare(self) -> Thread:
        """Read the vocabulary in a thread, which takes a second in which no other Python code runs."""
        thread = Thread(target=self._prepare, name="vocabulary", daemon=True)
        thread.start()
        return thread

    def _prepare(self) -> None:
        try:
            self.grammars = self._make()
        except Exception as error:
            is_ours = isinstance(error, ChairliftError)
            self._problem = error if is_ours else RequestError(f"structured output does not work here: {error}")

    def cached(self, source: str) -> Constraint | None:
        """Return the constraint of a grammar that is compiled already."""
        return None if self.grammars is None else self.grammars.cached(source)

    def start(self, name: str, source: str) -> None:
        """Compile a grammar for a request."""
        self._threads.submit(self._compile, name, source)

    def close(self) -> None:
        """Drop the grammars that are not being compiled yet: the process would compile them all before it ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, name: str, source: str) -> None:
        found: Constraint | Exception
        try:
            if self.grammars is None:
                raise self._problem or RequestError("structured output is not ready yet: try again in a moment")
            found = self.grammars.constraint(source)
        except Exception as error:
            found = error
        self._done.append(Compiled(name, found))
        with suppress(BlockingIOError):  # the reader has thousands to read already
            os.write(self._writer, b"x")

    def take(self) -> list[Compiled]:
        """Return what has been compiled since the last call."""
        if not self._done:
            return []
        with suppress(BlockingIOError):  # the byte is written after the result
            os.read(self.reader, 1 << 16)
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found
