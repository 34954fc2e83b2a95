"""Linear layers in float32 on the CPU: the weight packed in panels, the layer one compiled kernel."""

from __future__ import annotations

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import njit

from chairlift.ops.norm import normalize
from chairlift.ops.team import bind, run
from chairlift.ops.tile import PANEL, ROWS, WIDTH, exp, panel_tile, prefetch

_K_BLOCK = {4: 576, 8: 384, 16: 96}[WIDTH]  # a panel's share of K that stays in the first-level cache for all rows
_ROW_BLOCK = 192  # rows that pass over a panel together: their inputs and sums stay in the second-level cache
_LINE = 64  # bytes in a cache line
_FETCHES_AHEAD = WIDTH > 4  # measured: a tenth faster with AVX512, a hundredth slower with NEON
PLAIN, ADD, GATED = 0, 1, 2  # what becomes of a product: stored, added to the output, or gated


def pack(weight: torch.Tensor, gated: bool) -> np.ndarray:
    """[panels, in, PANEL], zero-padded; of a gated weight, each gate panel is followed by its up panel."""
    halves = [_panels(half) for half in (weight.chunk(2) if gated else (weight,))]
    if not gated:
        return halves[0]
    return np.ascontiguousarray(np.stack(halves, axis=1).reshape(-1, *halves[0].shape[1:]))


def _panels(weight: torch.Tensor) -> np.ndarray:
    rows, columns = weight.shape
    panels = -(-rows // PANEL)
    if rows % PANEL:
        weight = F.pad(weight, (0, 0, 0, panels * PANEL - rows))
    return weight.view(panels, PANEL, columns).transpose(1, 2).contiguous().numpy()


@njit(nogil=True, fastmath=True, error_model="numpy", cache=True)
def multiply(
    pieces: int,
    x: np.ndarray,
    scale: np.ndarray,
    eps: float,
    source: np.ndarray,
    packed: np.ndarray,
    bias: np.ndarray,
    out: np.ndarray,
    mode: int,
    gate: tuple[float, float],
) -> None:
    """Compute the layer of x into `out`; `source` is where the normed input goes, or x itself without a norm."""
    if scale.size:
        run(pieces, *bind(_norm_rows, (x, scale, eps, source)))
    run(pieces, *bind(_multiply_tiles, (source, packed, bias, out, mode, gate)))


@njit(nogil=True, fastmath=True, error_model="numpy")
def _norm_rows(x: np.ndarray, scale: np.ndarray, eps: float, out: np.ndarray, piece: int, pieces: int) -> None:
    tokens = x.shape[0]
    normalize(x, scale, eps, out, tokens * piece // pieces, tokens * (piece + 1) // pieces)


@njit(nogil=True, fastmath=True, error_model="numpy")
def _multiply_tiles(
    x: np.ndarray,
    packed: np.ndarray,
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
    # Every panel is computed into this buffer and stored from there: that is where the bias, the residual, the gate
    # and the last panel's padding are dealt with.
    tile = np.empty((min(tokens, _ROW_BLOCK), span), np.float32)
    tile_at = tile.ctypes.data
    for row in range(0, tokens, _ROW_BLOCK):
        rows = min(_ROW_BLOCK, tokens - row)
        # Shares are even in tiles, not in panels: of 9 panels two pieces are 4.5 each, cut between two rows.
        tiles = -(-rows // ROWS)
        first, last = groups * tiles * piece // pieces, groups * tiles * (piece + 1) // pieces
        for group in range(first // tiles, -(-last // tiles)):
            top = row + rows * max(first - group * tiles, 0) // tiles
            count = row + rows * min(last - group * tiles, tiles) // tiles - top
            for half in range(step):
                panel_at = packed_at + (group * step + half) * depth * PANEL * 4
                _multiply(x_at + top * depth * 4, count, depth, panel_at, tile_at + half * PANEL * 4, span)
            _store(tile, count, bias, out, mode, gate, top, group * PANEL, min(group * PANEL + PANEL, width))


@njit(nogil=True, error_model="numpy")
def _multiply(x_at: int, tokens: int, depth: int, panel_at: int, tile_at: int, span: int) -> None:
    """All rows times one panel, a K block at a time."""
    blocks = -(-tokens // ROWS)
    for k in range(0, depth, _K_BLOCK):
        count = min(_K_BLOCK, depth - k)
        here = panel_at + k * PANEL * 4
        ahead = here + count * PANEL * 4  # what comes next lies right behind
        share = -(-count * PANEL * 4 // (blocks * _LINE)) * _LINE
        for block in range(blocks):
            if _FETCHES_AHEAD and blocks > 1:
                for line in range(ahead, ahead + share, _LINE):
                    prefetch(line)  # the next block arrives from memory while this one is used
                ahead += share
            # Even shares instead of full tiles and a rest: a tile of one row takes almost as long as one of four.
            row, end = tokens * block // blocks, tokens * (block + 1) // blocks
            x_row, tile_row = x_at + (row * depth + k) * 4, tile_at + row * span * 4
            panel_tile(end - row, x_row, depth, here, tile_row, span, count, k)


@njit(nogil=True, fastmath=True, error_model="numpy")
def _store(
    tile: np.ndarray,
    rows: int,
    bias: np.ndarray,
    out: np.ndarray,
    mode: int,
    gate: tuple[float, float],
    top: int,
    first: int,
    last: int,
) -> None:
    """Write one panel's columns to their place, with all that follows the product."""
    linear, cubic = numba.float32(gate[0]), numba.float32(gate[1])
    start, count = numba.uintp(first), numba.uintp(last - first)  # unsigned, or LLVM makes no vectors of it
    for row in range(numba.uintp(rows)):
        to = numba.uintp(top) + row
        if mode == GATED:
            for i in range(count):
                g = tile[row, i]
                up = tile[row, i + numba.uintp(PANEL)]
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
