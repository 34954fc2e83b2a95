"""Linear layers in float32 on the CPU: weights packed in panels, one compiled kernel per layer.

Weights of 16 bits are packed as they are. A part of a panel that fits the L1 cache is converted to float32 there and
multiplied by all rows: memory is read for half the bytes, and the results have the bits of float32 weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import torch
from numba import njit, prange

from chairlift.ops.assistant import claim, finish, take_item
from chairlift.ops.norm import normalize
from chairlift.ops.tile import AHEAD, PANEL, ROWS, WIDTH, exp, panel_tile, prefetch
from chairlift.ops.widen import FLOAT32, widen

_K_BLOCK = {4: 576, 8: 384, 16: 96}[WIDTH]  # the part of a panel, along K, that fits the L1 cache while all rows use it
_ROW_BLOCK = 192  # rows multiplied by a panel together: their inputs and sums fit the L2 cache
_LINE = 64  # bytes in a cache line
_FETCHES_AHEAD = WIDTH > 4  # measured: 10% faster with AVX512, 1% slower with NEON
_CHUNK = 1 << 22  # weights packed at a time
PLAIN, ADD, GATED = 0, 1, 2  # whether a product is stored, added to the output, or gated


def pack(weight: torch.Tensor, gated: bool, release: Callable[[], None] = lambda: None) -> np.ndarray:
    """Return panels [n, bytes], each [in, PANEL], zero-padded; in a gated weight each gate panel precedes its up panel.

    `release` is called after every part of the weight, to release the pages of a mapped file.
    """
    parts = weight.chunk(2) if gated else (weight,)
    rows, columns = parts[0].shape
    panels = weight.new_empty(-(-rows // PANEL), len(parts), columns, PANEL)
    step = max(1, _CHUNK // (PANEL * columns))
    for number, part in enumerate(parts):
        for first in range(0, rows // PANEL, step):
            last = min(first + step, rows // PANEL)
            panels[first:last, number] = part[first * PANEL : last * PANEL].view(-1, PANEL, columns).transpose(1, 2)
            release()
        if rest := rows % PANEL:
            panels[-1, number, :, :rest], panels[-1, number, :, rest:] = part[-rest:].t(), 0
            release()
    return panels.flatten(0, 1).flatten(1).view(torch.uint8).numpy()


@njit(nogil=True, parallel=True, fastmath=True, error_model="numpy", cache=True)
def multiply(
    pieces: int,
    x: np.ndarray,
    scale: np.ndarray,
    eps: float,
    source: np.ndarray,
    packed: np.ndarray,
    kind: int,
    bias: np.ndarray,
    out: np.ndarray,
    mode: int,
    gate: tuple[float, float],
) -> None:
    """Compute the layer of x into `out`; `source` is a buffer for the normed input, or x itself without a norm.

    `kind` is the dtype of the packed weight (widen.py).
    """
    if scale.size:
        for piece in prange(pieces):
            _norm_rows(x, scale, eps, source, piece, pieces)
    for piece in prange(pieces):
        _multiply_tiles(source, packed, kind, bias, out, mode, gate, piece, pieces)


def items_of(x: np.ndarray, packed: np.ndarray, mode: int) -> int:
    """Return the number of items of a shared product."""
    return len(packed) // (2 if mode == GATED else 1) * -(-len(x) // _ROW_BLOCK)


@njit(nogil=True, fastmath=True, error_model="numpy", cache=True)
def multiply_shared(
    board: np.ndarray,
    region: int,
    items: int,
    leads: bool,
    x: np.ndarray,
    packed: np.ndarray,
    kind: int,
    bias: np.ndarray,
    out: np.ndarray,
    mode: int,
    gate: tuple[float, float],
) -> None:
    """Compute a product into `out` together with another thread: an item is a panel and up to _ROW_BLOCK rows."""
    (tokens, depth), width = x.shape, out.shape[1]
    step = 2 if mode == GATED else 1
    groups, span = packed.shape[0] // step, step * PANEL
    tile = np.empty((min(tokens, _ROW_BLOCK), span), np.float32)
    wide = np.empty(0 if kind == FLOAT32 else min(depth, _K_BLOCK) * PANEL, np.float32)
    item = take_item(board, region, items, leads)
    while item >= 0:
        top, group = item // groups * _ROW_BLOCK, item % groups
        count = min(_ROW_BLOCK, tokens - top)
        for half in range(step):
            panel_at = packed.ctypes.data + (group * step + half) * packed.shape[1]
            tile_at = tile.ctypes.data + half * PANEL * 4
            _multiply(x.ctypes.data + top * depth * 4, count, depth, panel_at, kind, wide.ctypes.data, tile_at, span)
        if claim(board, region, item):
            store(tile, count, PANEL, bias, out, mode, gate, top, group * PANEL, min(group * PANEL + PANEL, width))
            finish(board, region, item)
        item = take_item(board, region, items, leads)


@njit(nogil=True, fastmath=True, error_model="numpy")
def _norm_rows(x: np.ndarray, scale: np.ndarray, eps: float, out: np.ndarray, piece: int, pieces: int) -> None:
    tokens = x.shape[0]
    normalize(x, scale, eps, out, tokens * piece // pieces, tokens * (piece + 1) // pieces)


@njit(nogil=True, fastmath=True, error_model="numpy")
def _multiply_tiles(
    x: np.ndarray,
    packed: np.ndarray,
    kind: int,
    bias: np.ndarray,
    out: np.ndarray,
    mode: int,
    gate: tuple[float, float],
    piece: int,
    pieces: int,
) -> None:
    """Compute some tiles of the output."""
    (tokens, depth), width = x.shape, out.shape[1]
    x_at, packed_at = x.ctypes.data, packed.ctypes.data
    step = 2 if mode == GATED else 1
    groups, span = packed.shape[0] // step, step * PANEL
    # Every panel is computed into this buffer; store applies bias, residual and gate and drops the padding as it
    # copies from there.
    tile = np.empty((min(tokens, _ROW_BLOCK), span), np.float32)
    wide = np.empty(0 if kind == FLOAT32 else min(depth, _K_BLOCK) * PANEL, np.float32)
    tile_at, wide_at = tile.ctypes.data, wide.ctypes.data
    for row in range(0, tokens, _ROW_BLOCK):
        rows = min(_ROW_BLOCK, tokens - row)
        # Divide tiles evenly, not panels: two pieces of 9 panels get 4.5 each, split between two rows.
        tiles = -(-rows // ROWS)
        first, last = groups * tiles * piece // pieces, groups * tiles * (piece + 1) // pieces
        for group in range(first // tiles, -(-last // tiles)):
            top = row + rows * max(first - group * tiles, 0) // tiles
            count = row + rows * min(last - group * tiles, tiles) // tiles - top
            for half in range(step):
                panel_at = packed_at + (group * step + half) * packed.shape[1]
                to = tile_at + half * PANEL * 4
                _multiply(x_at + top * depth * 4, count, depth, panel_at, kind, wide_at, to, span)
            store(tile, count, PANEL, bias, out, mode, gate, top, group * PANEL, min(group * PANEL + PANEL, width))


@njit(nogil=True, error_model="numpy")
def _multiply(
    x_at: int, tokens: int, depth: int, panel_at: int, kind: int, wide_at: int, tile_at: int, span: int
) -> None:
    """Multiply all rows by one panel, a K block at a time."""
    blocks, pitch = -(-tokens // ROWS), PANEL * (4 if kind == FLOAT32 else 2)
    for k in range(0, depth, _K_BLOCK):
        count = min(_K_BLOCK, depth - k)
        here, fetched = panel_at + k * pitch, AHEAD
        ahead = here + count * pitch  # the next block follows in memory
        share = -(-count * pitch // (blocks * _LINE)) * _LINE
        if kind != FLOAT32:
            widen(kind, here, count, wide_at)
            here, fetched = wide_at, 0
        for block in range(blocks):
            if _FETCHES_AHEAD and blocks > 1:
                for line in range(ahead, ahead + share, _LINE):
                    prefetch(line)  # the next block arrives from memory while this one is used
                ahead += share
            # Even tiles instead of full tiles and a rest: a tile of one row takes almost as long as one of four.
            row, end = tokens * block // blocks, tokens * (block + 1) // blocks
            x_row, tile_row = x_at + (row * depth + k) * 4, tile_at + row * span * 4
            panel_tile(end - row, x_row, depth, here, tile_row, span, count, k, fetched)


@njit(nogil=True, parallel=True, fastmath=True, error_model="numpy", cache=True)
def gate_halves(pieces: int, y: np.ndarray, out: np.ndarray, gate: tuple[float, float]) -> None:
    """Write gate(first half of the columns) times the second half, with the bits of a gated product."""
    rows, width = out.shape
    for piece in prange(pieces):
        first, last = rows * piece // pieces, rows * (piece + 1) // pieces
        store(y[first:last], last - first, width, np.empty(0, np.float32), out, GATED, gate, first, 0, width)


@njit(nogil=True, fastmath=True, error_model="numpy")
def store(
    tile: np.ndarray,
    rows: int,
    panel: int,
    bias: np.ndarray,
    out: np.ndarray,
    mode: int,
    gate: tuple[float, float],
    top: int,
    first: int,
    last: int,
) -> None:
    """Write one panel's columns to the output, with bias, residual or gate; `panel` is its width."""
    linear, cubic = numba.float32(gate[0]), numba.float32(gate[1])
    start, count = numba.uintp(first), numba.uintp(last - first)  # unsigned, so that LLVM vectorizes
    for row in range(numba.uintp(rows)):
        to = numba.uintp(top) + row
        if mode == GATED:
            for i in range(count):
                g = tile[row, i]
                up = tile[row, i + numba.uintp(panel)]
                out[to, start + i] = g / (numba.float32(1.0) + exp(-g * (linear + cubic * g * g))) * up
        elif mode == ADD:
            for i in range(count):
                out[to, start + i] += tile[row, i]
        else:
            for i in range(count):
                out[to, start + i] = tile[row, i]
        if bias.size:
            for i in range(count):
                out[to, start + i] += bias[start + i]
