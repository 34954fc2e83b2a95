"""The CPU's threads: a parallel region is cut into pieces, and whichever thread is running takes the next one.

A region is over when all its pieces are done, not when all threads have arrived: a thread that the system does not run,
because another process has its core, is waited for only if it holds a piece. OpenMP's regions wait for every thread,
and beside one busy process that made two threads slower than one.

A kernel makes a region with `run(state, pieces, *bind(function, arguments))`, where the compiled function takes these
arguments, which piece to compute, and of how many.
"""

from __future__ import annotations

import atexit
import platform
import threading
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_PIECES_OF_THREAD = 4  # few enough to cost nothing, enough that a thread which runs more of the time computes more
_IS_X86, _IS_ARM = (platform.machine().lower() in names for names in (("x86_64", "amd64"), ("aarch64", "arm64")))
_SPINS = 4_000 if _IS_X86 else 30_000  # looks for a next region before a thread goes to sleep: about 200 us
# The state, in int64s; what different threads write lies in different cache lines.
_CLAIM, _DONE, _KERNEL, _ARGS, _PIECES, _IS_OPEN, _ASLEEP, _ENDS, _STATE = 0, 8, 16, 17, 18, 19, 24, 25, 32
_BITS = 16  # of the claim word that count the pieces left; above them stands the number of the region
_i64 = ir.IntType(64)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _i64.as_pointer())


@intrinsic
def _load(_context: Any, address: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), emit


@intrinsic
def _store(_context: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _add(_context: Any, address: Any, value: Any) -> Any:
    """Add to a number; what it was before."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def _swap(_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Replace a number if it is as expected; whether it was."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        found = builder.cmpxchg(_pointer(builder, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), emit


@intrinsic
def _pause(_context: Any) -> Any:
    """Tell the core that this thread only waits."""

    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if _IS_X86:
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            builder.call(function, [])
        elif _IS_ARM:
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(function, [ir.IntType(32)(1)])  # yield
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def bind(_context: Any, function: Any, given: Any) -> Any:
    """Of a compiled function of (*given, piece, pieces): its address, and that of what is given to it, for `run`.

    What is given lies in the caller's frame, and must be the caller's own arguments, so that it outlives the region.
    """
    types_given = (*given.types, types.int64, types.int64)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        held = cgutils.alloca_once_value(builder, args[1])
        kind = context.call_conv.get_function_type(types.none, (types.int64,) * 3)
        bound = ir.Function(builder.module, kind, builder.module.get_unique_name("bound"))
        bound.linkage = "internal"
        inside = ir.IRBuilder(bound.append_basic_block())
        args_at, piece, pieces = context.call_conv.get_arguments(bound)
        values = cgutils.unpack_tuple(inside, inside.load(inside.inttoptr(args_at, held.type)))
        resolved = context.typing_context.resolve_function_type(signature.args[0], types_given, {})
        context.get_function(signature.args[0], resolved)(inside, [*values, piece, pieces])
        context.call_conv.return_value(inside, context.get_dummy_value())
        addresses = [builder.ptrtoint(each, _i64) for each in (bound, held)]
        return context.make_tuple(builder, signature.return_type, addresses)

    return types.UniTuple(types.int64, 2)(function, given), emit


@intrinsic
def _call(_context: Any, bound: Any, args_at: Any, piece: Any, pieces: Any) -> Any:
    """Call what `bind` has made; kernels raise nothing."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = context.call_conv.get_function_type(types.none, (types.int64,) * 3)
        function = builder.inttoptr(args[0], kind.as_pointer())
        result, error = (cgutils.alloca_once(builder, each.pointee) for each in kind.args[:2])
        builder.call(function, [result, error, *args[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@njit(nogil=True)
def _take(state: int) -> bool:
    """Compute one piece of the open region; whether there was one left.

    Kernel and arguments are read after the piece is claimed: from then on the region cannot end.
    """
    claim = _load(state + 8 * _CLAIM)
    left = claim & ((1 << _BITS) - 1)
    if left == 0:
        return False
    if _swap(state + 8 * _CLAIM, claim, claim - 1):
        pieces = _load(state + 8 * _PIECES)
        _call(_load(state + 8 * _KERNEL), _load(state + 8 * _ARGS), pieces - left, pieces)
        _add(state + 8 * _DONE, 1)
    return True


@njit(nogil=True)
def run(state: int, pieces: int, kernel: int, args_at: int) -> None:
    """Compute all pieces of a region, with whatever threads are awake; for calls from compiled functions.

    Where there is no team, or another engine's thread has it, this thread computes them all.
    """
    if state == 0 or not _swap(state + 8 * _IS_OPEN, 0, 1):
        for piece in range(pieces):
            _call(kernel, args_at, piece, pieces)
        return
    region = (_load(state + 8 * _CLAIM) >> _BITS) + 1
    _store(state + 8 * _DONE, 0)
    _store(state + 8 * _KERNEL, kernel)
    _store(state + 8 * _ARGS, args_at)
    _store(state + 8 * _PIECES, pieces)
    _store(state + 8 * _CLAIM, (region << _BITS) | pieces)
    while _take(state):
        pass
    while _load(state + 8 * _DONE) < pieces:
        _pause()
    _store(state + 8 * _IS_OPEN, 0)


@njit(nogil=True, cache=True)
def _help(state: int) -> None:
    """Compute pieces of regions until there has been none for a while."""
    spins = 0
    while spins < _SPINS and _load(state + 8 * _ENDS) == 0:
        if _take(state):
            spins = 0
        else:
            spins += 1
            _pause()
    _add(state + 8 * _ASLEEP, 1)


@njit(nogil=True, cache=True)
def _call_up(state: int) -> Any:
    """Return how many threads are asleep, and count them as awake."""
    count = _load(state + 8 * _ASLEEP)
    while not _swap(state + 8 * _ASLEEP, count, 0):
        count = _load(state + 8 * _ASLEEP)
    return count


class Team:
    """The threads that help the one that computes a step. They spin for a moment after each region, then sleep."""

    def __init__(self) -> None:
        raw = np.zeros(_STATE + 8, np.int64)
        first = -raw.ctypes.data // 8 % 8  # at a cache line
        self._state = raw[first : first + _STATE]
        self._address = self._state.ctypes.data
        self._helpers: list[threading.Thread] = []
        self._calls = threading.Semaphore(0)
        self._growing = threading.Lock()

    def call(self) -> tuple[int, int]:
        """Wake the threads that torch may use. Return the address that `run` takes, and how many pieces to make."""
        threads = torch.get_num_threads()
        if threads == 1:
            return 0, 1
        if len(self._helpers) < threads - 1:
            self._grow(threads - 1)
        if self._state[_ASLEEP] and (sleepers := int(_call_up(self._address))):
            self._calls.release(sleepers)
        return self._address, _PIECES_OF_THREAD * threads

    def _grow(self, count: int) -> None:
        with self._growing:
            if not self._helpers:
                atexit.register(self._end)
            while len(self._helpers) < count:
                thread = threading.Thread(target=self._serve, name="chairlift-team", daemon=True)
                self._helpers.append(thread)
                thread.start()

    def _serve(self) -> None:
        while not self._state[_ENDS]:
            _help(self._address)
            self._calls.acquire()

    def _end(self) -> None:
        """Let all threads return before the interpreter ends: compiled code must not be interrupted by that."""
        self._state[_ENDS] = 1
        self._calls.release(len(self._helpers))
        for thread in self._helpers:
            thread.join()


team = Team()
