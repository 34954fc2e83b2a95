"""Weights of 16 bits as float32: the values are the same, so products have the same bits as those of float32 weights.

LLVM vector code as in tile.py: a vector is converted in a register, and a part of a packed weight into a buffer.
"""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from chairlift.ops.tile import PANEL, WIDTH, emit_fetch

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}  # by the names of torch's dtypes
HAS_HALVES = platform.machine().lower() not in ("x86_64", "amd64") or llvm.get_host_cpu_features().get("f16c", False)
_LINE = 64  # bytes in a cache line
_FETCH_BYTES = 4096  # how far ahead of its use a weight is prefetched

_f32, _f16 = ir.FloatType(), ir.HalfType()
_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def emit_widen(builder: Any, halves: Any, kind: str) -> Any:
    """Emit the conversion of a vector of 16-bit lanes, float16 or bfloat16, to float32."""
    width = halves.type.count
    lanes, floats = ir.VectorType(_i32, width), ir.VectorType(_f32, width)

    def all_of(number: int) -> Any:
        return ir.Constant(lanes, [number] * width)

    if kind == "bfloat16":
        return builder.bitcast(builder.shl(builder.zext(halves, lanes), all_of(16)), floats)
    if HAS_HALVES:
        return builder.fpext(builder.bitcast(halves, ir.VectorType(_f16, width)), floats)
    # Exponent and fraction where a float32 has them, times the difference of the two exponents' zeros: exact.
    wide = builder.shl(builder.sext(halves, lanes), all_of(13))
    bits = builder.and_(wide, all_of(-0x70000001 + (1 << 32)))
    return builder.fmul(builder.bitcast(bits, floats), ir.Constant(floats, [2.0**112] * width))


def _row(kind: str) -> Any:
    """Return the function that converts one row of a panel, for Numba."""

    @intrinsic
    def widen_row(_context: Any, source: Any, target: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            source, target = (builder.inttoptr(address, _i8.as_pointer()) for address in args)
            for line in range(0, 2 * PANEL, _LINE):
                emit_fetch(builder, builder.gep(source, [_i64(_FETCH_BYTES + line)]))
            for first in range(0, PANEL, WIDTH):
                at = builder.gep(source, [_i64(2 * first)])
                halves = builder.load(builder.bitcast(at, ir.VectorType(_i16, WIDTH).as_pointer()))
                halves.align = 2
                floats = emit_widen(builder, halves, kind)
                to = builder.bitcast(builder.gep(target, [_i64(4 * first)]), floats.type.as_pointer())
                builder.store(floats, to).align = 4
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    return widen_row


_bfloat16_row, _float16_row = _row("bfloat16"), _row("float16")


@njit(nogil=True)
def widen(kind: int, source: int, rows: int, target: int) -> None:
    """Convert rows of a panel from one address to another."""
    for row in range(rows):
        if kind == BFLOAT16:
            _bfloat16_row(source + row * PANEL * 2, target + row * PANEL * 4)
        else:
            _float16_row(source + row * PANEL * 2, target + row * PANEL * 4)
