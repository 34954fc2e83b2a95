"""The CPU's threads: a parallel region is cut into pieces, one per thread.

A kernel runs a region with `run(pieces, *bind(function, arguments))`; the compiled function takes these arguments, the
number of its piece, and the number of pieces. No other module decides how regions run.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

# torch's linear algebra and our kernels must share one thread pool, or they compete for the cores: Numba's OpenMP layer
# uses the OpenMP runtime that torch has already loaded.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]
_i64 = ir.IntType(64)


@intrinsic
def bind(_context: Any, function: Any, given: Any) -> Any:
    """Return the addresses of a compiled function of (*given, piece, pieces) and of its arguments `given`, for `run`.

    `given` is stored in the caller's frame, and must be the caller's own arguments, so that it outlives the region.
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
    """Call a function from `bind`; kernels do not raise."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = context.call_conv.get_function_type(types.none, (types.int64,) * 3)
        function = builder.inttoptr(args[0], kind.as_pointer())
        result, error = (cgutils.alloca_once(builder, each.pointee) for each in kind.args[:2])
        builder.call(function, [result, error, *args[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@njit(nogil=True, parallel=True, cache=True)
def run(pieces: int, kernel: int, args_at: int) -> None:
    """Run all pieces of a region; for calls from compiled functions."""
    for piece in prange(pieces):
        _call(kernel, args_at, piece, pieces)
