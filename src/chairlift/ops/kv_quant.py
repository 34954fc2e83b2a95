"""Keys and values in 8 bits, int8 or fp8 (e4m3), with a scale per token and KV head.

A head's key or value x is stored as codes x / scale. The scale is the largest |x| divided by the largest code, rounded
up to bfloat16, so that no code is clipped. Every step is one correctly rounded float32 operation or a bit operation:
torch, the compiled CPU code and Triton produce the same bytes.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from chairlift.ops.tile import BLOCK_COLUMNS, block_tile, prefetch

# Values of the setting kv_dtype. NumPy and torch's indexing do not support fp8: its codes are stored as uint8.
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CONTAINERS = {torch.int8: torch.int8, torch.float8_e4m3fn: torch.uint8}
MAX_CODES = {torch.int8: 127, torch.float8_e4m3fn: 448}  # largest code
SCALE_BYTES = 2
LEAST = 1e-30  # lower bound of the largest |x|: a row of zeros needs a scale above 0


def quantize_reference(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of x [..., dim] in their container dtype, and the bfloat16 scales [...]."""
    wide = x.float()
    least = wide.abs().amax(-1).clamp(min=LEAST) * (1 / MAX_CODES[dtype])
    scales = (((least.view(torch.int32) + 0xFFFF) >> 16) << 16).view(torch.float32)
    codes = wide / scales.unsqueeze(-1)
    stored = codes.round().to(dtype) if dtype == torch.int8 else codes.to(dtype)
    return stored.view(CONTAINERS[dtype]), scales.bfloat16()


def dequantize_reference(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return codes times scales in float32; the scales broadcast."""
    return codes.view(dtype).float() * scales.float()


# ---- For the compiled CPU kernels: int8 arrays hold int8 codes, uint8 arrays e4m3 codes.

_f32, _i8, _i16, _i32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)


@intrinsic
def _unpack_line(_context: Any, codes_at: Any, numbers_at: Any, kind: Any) -> Any:
    """Convert 16 codes to float32, without scales; `kind` is any value of the container's type."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        codes = _load(builder, args[0], _i8)
        if kind == types.int8:
            numbers = builder.sitofp(codes, _lanes(_f32))
        else:
            # Shift sign, exponent (4 bits) and mantissa (3) to their float32 bits; the exponent bias differs by 120.
            bits = builder.shl(builder.sext(codes, _lanes(_i32)), _all(_i32, 20))
            small = builder.bitcast(builder.and_(bits, _all(_i32, 0x87F00000)), _lanes(_f32))
            numbers = builder.fmul(small, _all(_f32, 2.0**120))
        _store(builder, numbers, args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, kind), emit


@intrinsic
def _scale_line(_context: Any, numbers_at: Any, scales_at: Any) -> Any:
    """Multiply 16 float32 numbers by 16 bfloat16 scales."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.zext(_load(builder, args[1], _i16), _lanes(_i32))
        scales = builder.bitcast(builder.shl(bits, _all(_i32, 16)), _lanes(_f32))
        _store(builder, builder.fmul(_load(builder, args[0], _f32), scales), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _lanes(kind: Any) -> Any:
    return ir.VectorType(kind, BLOCK_COLUMNS)


def _all(kind: Any, value: float) -> Any:
    return ir.Constant(_lanes(kind), [value] * BLOCK_COLUMNS)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    value = builder.load(builder.inttoptr(address, _lanes(kind).as_pointer()))
    value.align = 1
    return value


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


@intrinsic
def _nearest(_context: Any, x: Any, kind: Any) -> Any:
    """Return the code nearest to a float32 within the codes' range; `kind` is any value of the container's type."""

    def emit(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = args[0]
        if signature.args[1] == types.int8:
            rint = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_f32, [_f32]), "llvm.rint.f32")
            return builder.fptosi(builder.call(rint, [x]), _i8)
        bits = builder.bitcast(x, _i32)
        size = builder.and_(bits, _i32(0x7FFFFFFF))
        # Round at the third bit of the mantissa, ties to even, and subtract 120 from the exponent.
        odd = builder.and_(builder.lshr(size, _i32(20)), _i32(1))
        normal = builder.sub(builder.lshr(builder.add(size, builder.add(odd, _i32(0x7FFFF))), _i32(20)), _i32(120 << 3))
        # Below 2**-6 codes are multiples of 2**-9, which is the spacing of float32 near 2**14: adding 2**14 rounds.
        near = builder.fadd(builder.bitcast(size, _f32), _f32(2.0**14))
        tiny = builder.sub(builder.bitcast(near, _i32), _i32((127 + 14) << 23))
        code = builder.select(builder.icmp_signed("<", size, _i32((127 - 6) << 23)), tiny, normal)
        sign = builder.and_(builder.lshr(bits, _i32(24)), _i32(0x80))
        return builder.trunc(builder.or_(code, sign), _i8)

    return kind(types.float32, kind), emit


@intrinsic
def _rounded_up(_context: Any, x: Any) -> Any:
    """Return the bits of a positive float32 rounded up to bfloat16."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.add(builder.bitcast(args[0], _i32), _i32(0xFFFF))
        return builder.trunc(builder.lshr(bits, _i32(16)), _i16)

    return types.int16(types.float32), emit


@intrinsic
def _widened(_context: Any, bits: Any) -> Any:
    """Convert the bits of a bfloat16 to float32."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], _i32), _i32(16)), _f32)

    return types.float32(types.int16), emit


@intrinsic
def _inverse_max_code(_context: Any, kind: Any) -> Any:
    """Return 1 / the largest code of a container's type."""
    max_code = MAX_CODES[torch.int8] if kind == types.int8 else MAX_CODES[torch.float8_e4m3fn]

    def emit(_context: Any, _builder: Any, _signature: Any, _args: Any) -> Any:
        return _f32(float(np.float32(1 / max_code)))

    return types.float32(kind), emit


_LEAST = numba.float32(LEAST)
_LINE = 64  # bytes in a cache line


@njit(nogil=True, error_model="numpy")
def store(
    x: np.ndarray,
    data: np.ndarray,
    scales: np.ndarray,
    block: int,
    side: int,
    head: int,
    offset: int,
    at: int,
    step: int,
) -> None:
    """Write the codes of x [dim] from `at` on, `step` apart, and their scale; no fastmath, which changes rounding."""
    kind = data[0, 0, 0, 0]
    peak = _LEAST
    for i in range(x.size):
        peak = max(peak, abs(x[i]))
    bits = _rounded_up(peak * _inverse_max_code(kind))
    scales[block, side, head, offset] = bits
    scale = _widened(bits)
    for i in range(x.size):
        data[block, side, head, at + i * step] = _nearest(x[i] / scale, kind)


@njit(nogil=True, error_model="numpy")
def _unpack(codes_at: int, pitch: int, lines: int, wide_at: int, kind: int) -> None:
    """Convert lines of 16 codes, `pitch` bytes apart, to float32."""
    for line in range(lines):
        _unpack_line(codes_at + line * pitch, wide_at + line * BLOCK_COLUMNS * 4, kind)


@njit(nogil=True, error_model="numpy")
def _scale(weights_at: int, pitch: int, rows: int, scales_at: int) -> None:
    """Multiply 16 columns of some rows, `pitch` floats apart, by the scales of their tokens."""
    for row in range(rows):
        _scale_line(weights_at + row * pitch * 4, scales_at)


@njit(nogil=True, error_model="numpy")
def _fetch(begin: int, size: int) -> None:
    """Prefetch the cache lines of `size` bytes."""
    for line in range(begin, begin + size, _LINE):
        prefetch(line)


@njit(nogil=True, error_model="numpy")
def score_narrow(
    queries_at: int, rows: int, dim: int, data: np.ndarray, tables: np.ndarray, piece: int, block_size: int,
    begin: int, end: int, head: int, span: int, weights: np.ndarray,
) -> None:  # fmt: skip
    """Write the scores begin..end of `rows` queries for each of `span` KV heads, from codes.

    The tile multiplies unscaled codes; scales are applied once per score instead of once per element.
    """
    kind, head_bytes = data[0, 0, 0, 0], data.shape[3]
    block_bytes, scales_from = 2 * data.shape[2] * head_bytes, dim * block_size
    keys_at, weights_at, pitch = data.ctypes.data + head * head_bytes, weights.ctypes.data, weights.shape[1]
    wide = np.empty(dim * BLOCK_COLUMNS, np.float32)
    wide_at = wide.ctypes.data
    for column in range(begin, end, BLOCK_COLUMNS):
        block, offset = tables[piece, column // block_size], column % block_size
        if column + BLOCK_COLUMNS < end:
            ahead = (tables[piece, (column + BLOCK_COLUMNS) // block_size] - block) * block_bytes
        else:  # the first values
            ahead = (tables[piece, begin // block_size] - block) * block_bytes + block_bytes // 2
        for h in range(span):
            at = keys_at + block * block_bytes + h * head_bytes
            if ahead != 0:
                _fetch(at + ahead, head_bytes)
            _unpack(at + offset, block_size, dim, wide_at, kind)
            a, c = queries_at + h * rows * dim * 4, weights_at + (h * rows * pitch + column) * 4
            block_tile(rows, a, dim, wide_at, BLOCK_COLUMNS, c, pitch, dim, 0, 0)
            _scale(c, pitch, rows, at + scales_from + offset * SCALE_BYTES)


@njit(nogil=True, error_model="numpy")
def weigh_narrow(
    weights: np.ndarray, rows: int, dim: int, data: np.ndarray, tables: np.ndarray, piece: int, block_size: int,
    begin: int, end: int, head: int, span: int, sums_at: int,
) -> None:  # fmt: skip
    """Write the weighted sums of the values begin..end, from codes; the scales are applied to the weights."""
    kind, head_bytes = data[0, 0, 0, 0], data.shape[3]
    block_bytes, scales_from = 2 * data.shape[2] * head_bytes, dim * block_size
    values_at, weights_at = data.ctypes.data + (data.shape[2] + head) * head_bytes, weights.ctypes.data
    wide, pitch = np.empty(dim * BLOCK_COLUMNS, np.float32), weights.shape[1]
    wide_at = wide.ctypes.data
    for column in range(begin, end, BLOCK_COLUMNS):
        block, offset = tables[piece, column // block_size], column % block_size
        ahead = (tables[piece, min(column + BLOCK_COLUMNS, end - 1) // block_size] - block) * block_bytes
        for h in range(span):
            at = values_at + block * block_bytes + h * head_bytes
            if ahead != 0:
                _fetch(at + ahead, head_bytes)
            _unpack(at + offset * dim, BLOCK_COLUMNS, dim, wide_at, kind)
            a, c = weights_at + (h * rows * pitch + column) * 4, sums_at + h * rows * dim * 4
            _scale(a, pitch, rows, at + scales_from + offset * SCALE_BYTES)
            for i in range(0, dim * 4, BLOCK_COLUMNS * 4):
                block_tile(rows, a, pitch, wide_at + i, dim, c + i, dim, BLOCK_COLUMNS, column - begin, 0)
