"""Linear layers: y = x @ W^T + b, optionally added to a residual in place, or gated as silu(gate) * up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import njit, prange

from chairlift.ops.norm import normalize, rms_norm_reference
from chairlift.ops.tile import PANEL, ROWS, WIDTH, exp, panel_tile, prefetch
from chairlift.ops.triton_found import HAS_TRITON

_K_BLOCK = {4: 576, 8: 384, 16: 96}[WIDTH]  # a panel's share of K that stays in the first-level cache for all rows
_ROW_BLOCK = 192  # rows that pass over a panel together: their inputs and sums stay in the second-level cache
_LINE = 64  # bytes in a cache line
_FETCHES_AHEAD = WIDTH > 4  # measured: a tenth faster with AVX512, a hundredth slower with NEON
_PLAIN, _ADD, _GATED = 0, 1, 2
_NOTHING = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm that a layer applies to its input first."""

    weight: torch.Tensor
    eps: float


class Linear:
    """A linear layer with all that is fused to it: the norm before, and after it the bias, the gate or the residual.

    The weight [out, in] lies as its device likes it: packed in panels for float32 on the CPU, as it is elsewhere.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, norm: Norm | None = None, gated: bool = False
    ) -> None:
        self.bias = bias
        self.norm = norm
        self.gated = gated  # the weight's rows are [gate; up], and the layer gives silu(gate) * up
        self.width = weight.shape[0] // 2 if gated else weight.shape[0]
        self.weight: torch.Tensor | None = None
        self._packed: np.ndarray | None = None
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and not (gated and bias is not None):
            self._packed = _pack(weight, gated)
            self._bias = _NOTHING if bias is None else bias.contiguous().numpy()
            self._scale = _NOTHING if norm is None else norm.weight.contiguous().numpy()
            self._eps = 0.0 if norm is None else norm.eps
        else:
            self.weight = weight

    @property
    def is_compiled(self) -> bool:
        """Whether it runs as a compiled kernel, on arrays."""
        return self._packed is not None

    @overload
    def __call__(self, x: np.ndarray, add_to: np.ndarray | None = None) -> np.ndarray: ...

    @overload
    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor: ...

    def __call__(self, x: Any, add_to: Any = None) -> Any:
        """The layer's output; with `add_to`, that one with the output added in place."""
        if isinstance(x, torch.Tensor) and self.is_compiled:
            return torch.from_numpy(self(x.numpy(), None if add_to is None else add_to.numpy()))
        if isinstance(x, np.ndarray) and not self.is_compiled:
            return self(torch.from_numpy(x), None if add_to is None else torch.from_numpy(add_to)).numpy()
        if self._packed is None:
            assert self.weight is not None
            if x.is_cuda and HAS_TRITON:
                return self._on_cuda(x, self.weight, add_to)
            return linear_reference(x, self.weight, self.bias, self.norm, self.gated, add_to)
        out = np.empty((x.shape[0], self.width), np.float32) if add_to is None else add_to
        mode = _GATED if self.gated else _PLAIN if add_to is None else _ADD
        source = np.empty(x.shape, np.float32) if self.norm else x
        _linear(x, self._scale, self._eps, source, self._packed, self._bias, out, mode, torch.get_num_threads())
        return out

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The layer's output, written where the caller wants it; not for compiled or gated layers."""
        assert self.weight is not None and not self.gated
        x = self._normed(x)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm is None:
            return x
        if not (x.is_cuda and HAS_TRITON):
            return rms_norm_reference(x, self.norm.weight, self.norm.eps)
        from chairlift.ops import fused_cuda

        return fused_cuda.rms_norm(x, self.norm.weight, self.norm.eps)

    def _on_cuda(self, x: torch.Tensor, weight: torch.Tensor, add_to: torch.Tensor | None) -> torch.Tensor:
        """Few rows in one kernel; else the product by cuBLAS, which adds the residual, the norm and the gate apart."""
        from chairlift.ops import fused_cuda, skinny_cuda

        if skinny_cuda.pays(x.shape[0], weight.shape[0]):
            scale, eps = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)
            return skinny_cuda.linear(x, weight, self.bias, scale, eps, self.gated, add_to)
        x = self._normed(x)
        if add_to is not None and self.bias is None and not self.gated:
            return add_to.addmm_(x, weight.t())
        y = F.linear(x, weight, self.bias)
        if self.gated:
            y = fused_cuda.silu_mul(y)
        return y if add_to is None else add_to.add_(y)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch."""
    y = F.linear(x if norm is None else rms_norm_reference(x, norm.weight, norm.eps), weight, bias)
    if gated:
        y = silu_mul_reference(y)
    return y if add_to is None else add_to.add_(y)


def silu_mul_reference(y: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the columns, times the second half."""
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def _pack(weight: torch.Tensor, gated: bool) -> np.ndarray:
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


@njit(nogil=True, parallel=True, fastmath=True, error_model="numpy", cache=True)
def _linear(
    x: np.ndarray,
    scale: np.ndarray,
    eps: float,
    source: np.ndarray,
    packed: np.ndarray,
    bias: np.ndarray,
    out: np.ndarray,
    mode: int,
    threads: int,
) -> None:
    tokens, depth = x.shape
    width = out.shape[1]
    step = 2 if mode == _GATED else 1
    groups = packed.shape[0] // step
    span = step * PANEL
    # What is read by address must be an argument: Numba frees a local array after the last mention of its name.
    if scale.size:
        for thread in prange(threads):
            normalize(x, scale, eps, source, tokens * thread // threads, tokens * (thread + 1) // threads)
    x_at, packed_at = source.ctypes.data, packed.ctypes.data
    for thread in prange(threads):
        # Every panel is computed into this buffer and stored from there: that is where the bias, the residual, the gate
        # and the last panel's padding are dealt with.
        tile = np.empty((min(tokens, _ROW_BLOCK), span), np.float32)
        tile_at = tile.ctypes.data
        for row in range(0, tokens, _ROW_BLOCK):
            rows = min(_ROW_BLOCK, tokens - row)
            # Shares are even in tiles, not in panels: two threads have 4.5 panels each of 9, cut between two rows.
            tiles = -(-rows // ROWS)
            first, last = groups * tiles * thread // threads, groups * tiles * (thread + 1) // threads
            for group in range(first // tiles, -(-last // tiles)):
                top = row + rows * max(first - group * tiles, 0) // tiles
                count = row + rows * min(last - group * tiles, tiles) // tiles - top
                for half in range(step):
                    panel_at = packed_at + (group * step + half) * depth * PANEL * 4
                    _multiply(x_at + top * depth * 4, count, depth, panel_at, tile_at + half * PANEL * 4, span)
                _store(tile, count, bias, out, mode, top, group * PANEL, min(group * PANEL + PANEL, width))


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
    tile: np.ndarray, rows: int, bias: np.ndarray, out: np.ndarray, mode: int, top: int, first: int, last: int
) -> None:
    """Write one panel's columns to their place, with all that follows the product."""
    start, count = numba.uintp(first), numba.uintp(last - first)  # unsigned, or LLVM makes no vectors of it
    for row in range(numba.uintp(rows)):
        to = numba.uintp(top) + row
        if mode == _GATED:
            for i in range(count):
                gate = tile[row, i]
                up = tile[row, i + numba.uintp(PANEL)]
                out[to, start + i] = gate / (numba.float32(1.0) + exp(-gate)) * up
        elif mode == _ADD:
            for i in range(count):
                out[to, start + i] += tile[row, i]
        else:
            for i in range(count):
                out[to, start + i] = tile[row, i]
        if bias.size:
            for i in range(count):
                out[to, start + i] += bias[start + i]
