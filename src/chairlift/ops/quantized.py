"""Linear layers of quantized weights on the CPU: inputs quantized to 8 bits by group, weights packed in panels.

A group of a row's inputs is a record: its codes, its scale, and the sum that centres and minimums of weights need.
The records of a tile's rows are interleaved, group by group, so that the micro-kernel (dot.py) reads one stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from chairlift.ops.assistant import claim, finish, take_item
from chairlift.ops.norm import normalize
from chairlift.ops.packed import GATED, store
from chairlift.ops.panels import PANEL, ROWS

_f32, _i8, _i32, _i64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_TILE_BLOCK = 32  # tiles multiplied by a panel together: their records and sums stay in the L2 cache
_LEAST = 1e-30  # a group of smaller inputs has codes of zero: 127 / its maximum could overflow


@intrinsic
def _call(_context: Any, kernel: Any, rows: Any, inputs: Any, count: Any, panel: Any, out: Any, width: Any) -> Any:
    """Call a compiled tile by its address."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_i64] * 6)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), emit


def _quantizer(group: int) -> Any:
    """Return the function that quantizes one group of inputs, for Numba."""
    floats, lanes = ir.VectorType(_f32, group), ir.VectorType(_i32, group)

    @intrinsic
    def quantize(_context: Any, source: Any, record: Any, centre: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            def function(name: str, result: Any, *arguments: Any) -> Any:
                kind = ir.FunctionType(result, [each.type for each in arguments])
                return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

            def spread(value: Any) -> Any:
                none = ir.Constant(floats, ir.Undefined)
                one = builder.insert_element(none, value, _i32(0))
                return builder.shuffle_vector(one, none, ir.Constant(lanes, [0] * group))

            def store(value: Any, offset: int) -> None:
                at = builder.gep(record, [_i64(offset)])
                builder.store(value, builder.bitcast(at, value.type.as_pointer())).align = 4

            source, record, centre = args
            record = builder.inttoptr(record, _i8.as_pointer())
            x = builder.load(builder.inttoptr(source, floats.as_pointer()))
            x.align = 4
            # The largest magnitude, compared as integers: unlike a maximum of floats it is NaN if an input is.
            bits = builder.and_(builder.bitcast(x, lanes), ir.Constant(lanes, [0x7FFFFFFF] * group))
            largest = builder.bitcast(function(f"llvm.vector.reduce.umax.v{group}i32", _i32, bits), _f32)
            is_usual = builder.fcmp_ordered(">=", largest, ir.Constant(_f32, _LEAST_FLOAT))
            ratio = builder.fdiv(ir.Constant(_f32, 127.0), largest)
            inverse = builder.select(is_usual, ratio, ir.Constant(_f32, 0.0))
            scale = builder.fmul(largest, ir.Constant(_f32, float(np.float32(1 / 127))))
            rounded = function(f"llvm.rint.v{group}f32", floats, builder.fmul(x, spread(inverse)))
            whole = builder.fptosi(rounded, lanes)
            total = function(f"llvm.vector.reduce.add.v{group}i32", _i32, whole)
            negated = builder.neg(builder.mul(total, builder.trunc(centre, _i32)))
            scaled = builder.bitcast(builder.fmul(builder.sitofp(total, _f32), scale), _i32)
            store(builder.trunc(whole, ir.VectorType(_i8, group)), 0)
            store(scale, group)
            store(builder.select(builder.icmp_signed("!=", centre, _i64(0)), negated, scaled), group + 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), emit

    return quantize


_LEAST_FLOAT = float(np.float32(_LEAST))
_quantize_16, _quantize_32 = _quantizer(16), _quantizer(32)


@njit(nogil=True, parallel=True, fastmath=True, error_model="numpy", cache=True)
def multiply(
    pieces: int,
    kernel: int,
    x: np.ndarray,
    scale: np.ndarray,
    eps: float,
    normed: np.ndarray,
    group: int,
    centre: int,
    records: np.ndarray,
    panels: np.ndarray,
    bias: np.ndarray,
    out: np.ndarray,
    mode: int,
    gate: tuple[float, float],
) -> None:
    """Compute the layer of x into `out`; `normed` is a buffer for the normed input, or x itself without a norm."""
    for piece in prange(pieces):
        _quantize_rows(x, scale, eps, normed, group, centre, records, piece, pieces)
    for piece in prange(pieces):
        _multiply_tiles(kernel, x.shape[0], x.shape[1] // group, records, panels, bias, out, mode, gate, piece, pieces)


def items_of(rows: int, panels: np.ndarray, mode: int) -> int:
    """Return the number of items of a shared product."""
    return len(panels) // (2 if mode == GATED else 1) * -(-rows // (_TILE_BLOCK * ROWS))


@njit(nogil=True, fastmath=True, error_model="numpy", cache=True)
def multiply_shared(
    board: np.ndarray,
    region: int,
    items: int,
    leads: bool,
    kernel: int,
    rows: int,
    count: int,
    records: np.ndarray,
    panels: np.ndarray,
    bias: np.ndarray,
    out: np.ndarray,
    mode: int,
    gate: tuple[float, float],
) -> None:
    """Compute a product into `out` together with another thread: an item is a panel and up to _TILE_BLOCK tiles."""
    width, step = out.shape[1], 2 if mode == GATED else 1
    groups, span = panels.shape[0] // step, step * PANEL
    record_bytes, panel_bytes = records.size // (rows * count), panels.shape[1]
    tile = np.empty((min(rows, _TILE_BLOCK * ROWS), span), np.float32)
    tiles = -(-rows // ROWS)
    item = take_item(board, region, items, leads)
    while item >= 0:
        start, panel = item // groups * _TILE_BLOCK, item % groups
        stop = min(start + _TILE_BLOCK, tiles)
        first, last = rows * start // tiles, rows * stop // tiles
        for number in range(start, stop):
            top, end = rows * number // tiles, rows * (number + 1) // tiles
            at = records.ctypes.data + top * count * record_bytes
            for half in range(step):
                panel_at = panels.ctypes.data + (panel * step + half) * panel_bytes
                tile_at = tile.ctypes.data + ((top - first) * span + half * PANEL) * 4
                _call(kernel, end - top, at, count, panel_at, tile_at, span)
        if claim(board, region, item):
            left = panel * PANEL
            store(tile, last - first, PANEL, bias, out, mode, gate, first, left, min(left + PANEL, width))
            finish(board, region, item)
        item = take_item(board, region, items, leads)


@njit(nogil=True, fastmath=True, error_model="numpy", cache=True)
def quantize_rows(
    x: np.ndarray,
    scale: np.ndarray,
    eps: float,
    normed: np.ndarray,
    group: int,
    centre: int,
    records: np.ndarray,
) -> None:
    """Write the records of all rows, in this thread alone."""
    _quantize_rows(x, scale, eps, normed, group, centre, records, 0, 1)


@njit(nogil=True, fastmath=True, error_model="numpy")
def _quantize_rows(
    x: np.ndarray,
    scale: np.ndarray,
    eps: float,
    normed: np.ndarray,
    group: int,
    centre: int,
    records: np.ndarray,
    piece: int,
    pieces: int,
) -> None:
    """Write the records of some rows."""
    (rows, depth), tiles = x.shape, -(-x.shape[0] // ROWS)
    count, size = depth // group, group + 8
    first, last = rows * piece // pieces, rows * (piece + 1) // pieces
    if scale.size:
        normalize(x, scale, eps, normed, first, last)
    for row in range(first, last):
        # Tile t has the rows from rows * t // tiles on.
        tile = ((row + 1) * tiles - 1) // rows
        top = rows * tile // tiles
        wide = rows * (tile + 1) // tiles - top
        source = normed.ctypes.data + row * depth * 4
        record = records.ctypes.data + (top * count + row - top) * size
        for _ in range(count):
            if group == 32:
                _quantize_32(source, record, centre)
            else:
                _quantize_16(source, record, centre)
            source += group * 4
            record += wide * size


@njit(nogil=True, fastmath=True, error_model="numpy")
def _multiply_tiles(
    kernel: int,
    rows: int,
    count: int,
    records: np.ndarray,
    panels: np.ndarray,
    bias: np.ndarray,
    out: np.ndarray,
    mode: int,
    gate: tuple[float, float],
    piece: int,
    pieces: int,
) -> None:
    """Compute some tiles of the output."""
    width, step = out.shape[1], 2 if mode == GATED else 1
    groups, span = panels.shape[0] // step, step * PANEL
    records_at, record_bytes = records.ctypes.data, records.size // (rows * count)
    panels_at, panel_bytes = panels.ctypes.data, panels.shape[1]
    tile = np.empty((ROWS, span), np.float32)
    tile_at = tile.ctypes.data
    tiles = -(-rows // ROWS)
    for start in range(0, tiles, _TILE_BLOCK):
        inside = min(_TILE_BLOCK, tiles - start)
        # Divide tiles evenly, not panels: two pieces of 9 panels get 4.5 each, split between two tiles.
        first, last = groups * inside * piece // pieces, groups * inside * (piece + 1) // pieces
        for item in range(first, last):
            panel, number = item // inside, start + item % inside
            top, end = rows * number // tiles, rows * (number + 1) // tiles
            at = records_at + top * count * record_bytes
            for half in range(step):
                panel_at = panels_at + (panel * step + half) * panel_bytes
                _call(kernel, end - top, at, count, panel_at, tile_at + half * PANEL * 4, span)
            left = panel * PANEL
            store(tile, end - top, PANEL, bias, out, mode, gate, top, left, min(left + PANEL, width))


def quantize_reference(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes [rows, inputs] and scales [rows, groups] of inputs, in plain NumPy."""
    groups = x.reshape(len(x), -1, group)
    largest = np.abs(groups).max(-1)
    safe = np.where(largest >= np.float32(_LEAST), largest, np.float32(np.inf))
    codes = np.rint(groups * (np.float32(127) / safe)[..., None]).astype(np.int8)
    return codes.reshape(x.shape), largest * np.float32(1 / 127)
