"""Assistant: a thread that shares the work of linear layers, for which the calling thread never has to wait.

A parallel region ends when its last thread does, and a thread that shares its core with another process is not run for
milliseconds at a time. Here the work is many small items. Each thread takes the next item, so that the faster thread
takes more. When no item is left, the caller also computes the item that the assistant has not finished, instead of
waiting for it; the thread that is done first stores the result.

The threads share a board, an array of 64-bit integers: the number of the region with its next item, and for each item
the last region in which it was stored. Regions are numbered, so that an assistant that resumes late has no effect.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_i64 = ir.IntType(64)


@intrinsic
def _load(_context: Any, address: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _i64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), emit


@intrinsic
def _swap(_context: Any, address: Any, old: Any, new: Any) -> Any:
    """Replace `old` by `new`; return whether it was `old`."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        found = builder.cmpxchg(builder.inttoptr(args[0], _i64.as_pointer()), args[1], args[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(found, 1), _i64)

    return types.int64(*[types.int64] * 3), emit


@njit(nogil=True)
def take_item(board: np.ndarray, region: int, items: int, leads: bool) -> int:
    """Return the next item of a region for this thread to compute, or -1.

    After the last item, the caller (`leads`) gets items that the assistant has begun and not stored. For the caller, -1
    means that all items are stored.
    """
    counter = board.ctypes.data
    while True:
        found: int = _load(counter)
        item = found & 0xFFFFFF
        if found >> 24 != region or item >= items:
            break
        if _swap(counter, found, found + 1):
            return item
    if leads:
        for item in range(items):
            if _load(counter + 8 + item * 8) < 2 * region:
                return item
        for item in range(items):
            while _load(counter + 8 + item * 8) == 2 * region:
                pass  # the assistant is storing it
    return -1


@njit(nogil=True)
def claim(board: np.ndarray, region: int, item: int) -> bool:
    """Return whether this thread may store the item's result: no other has, and the region has not ended."""
    at = board.ctypes.data + 8 + item * 8
    found: int = _load(at)
    return found < 2 * region and bool(_swap(at, found, 2 * region))


@njit(nogil=True)
def finish(board: np.ndarray, region: int, item: int) -> None:
    """Report that the item's result is stored, unless the region has ended and a later one has taken the item."""
    _swap(board.ctypes.data + 8 + item * 8, 2 * region, 2 * region + 1)


class Assistant:
    """The assistant's thread, and the board that it shares with the calling thread."""

    def __init__(self) -> None:
        self._board = np.zeros(1 << 12, np.int64)
        self._region = 0
        self._work: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        self._sharing = threading.Lock()
        self._wake = threading.Lock()
        self._wake.acquire()
        self._core = -1  # of the caller
        self._thread = threading.Thread(target=self._run, name="assistant", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            work = self._work
            if work is not None:
                work[0](*work[1])
            del work  # frees the arrays

    def share(self, kernel: Callable[..., None], items: int, *arguments: Any) -> None:
        """Run a kernel on both threads; return when its items are all stored."""
        with self._sharing:
            if items >= len(self._board):
                self._board = np.zeros(2 * items, np.int64)
            board, region = self._board, self._region + 1
            self._region = region
            board[0] = region << 24
            self._leave_core()
            self._work = kernel, (board, region, items, False, *arguments)
            if self._wake.locked():
                self._wake.release()
            kernel(board, region, items, True, *arguments)
            self._work = None

    def _leave_core(self) -> None:
        """Keep the assistant from the caller's core, where it would take the caller's time."""
        core = _core()
        if core == self._core:
            return
        self._core = core
        others = os.sched_getaffinity(threading.get_native_id()) - {core}
        if others and self._thread.native_id is not None:
            with suppress(OSError):  # a sandbox may forbid it, which only costs time
                os.sched_setaffinity(self._thread.native_id, others)


def _core() -> int:
    """Return the core that this thread runs on, -1 where that is unknown."""
    return _LIBC.sched_getcpu() if _LIBC is not None else -1


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_assistant: Assistant | None = None
_is_used = False


def use_assistant(is_used: bool) -> None:
    """Choose whether linear layers share their work with an assistant, instead of among OpenMP's threads."""
    global _assistant, _is_used
    _assistant = _assistant or (Assistant() if is_used else None)
    _is_used = is_used


@contextmanager
def assisted() -> Iterator[None]:
    """Use the assistant meanwhile."""
    before = _is_used
    use_assistant(True)
    try:
        yield
    finally:
        use_assistant(before)


def assistant() -> Assistant | None:
    """Return the assistant, if it is used."""
    return _assistant if _is_used else None
