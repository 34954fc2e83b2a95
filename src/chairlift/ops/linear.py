"""Linear layers: y = x @ W^T + b, optionally added to a residual in place, or gated as silu(gate) * up."""

from __future__ import annotations

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import njit, prange

from chairlift.ops.tile import PANEL, ROWS, exp, panel_tile

_K_BLOCK = 512  # a panel's share of K that stays in the first-level cache while all rows pass over it
_PLAIN, _ADD, _GATED = 0, 1, 2


class Weight:
    """A weight [out, in] as its device likes it: packed in panels for float32 on the CPU, as it is elsewhere."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False) -> None:
        self.shape = weight.shape
        self.bias = bias
        self.gated = gated  # rows are [gate; up] and the layer gives silu(gate) * up
        self.packed: np.ndarray | None = None
        self.tensor: torch.Tensor | None = None
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and not (gated and bias is not None):
            self.packed = _pack(weight, gated)
            self.bias_array = np.empty(0, np.float32) if bias is None else bias.contiguous().numpy()
        else:
            self.tensor = weight

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's output; with `add_to`, that tensor with the output added in place."""
        if self.packed is None:
            assert self.tensor is not None
            return linear_reference(x, self.tensor, self.bias, self.gated, add_to)
        columns = self.shape[0] // 2 if self.gated else self.shape[0]
        out = torch.empty(x.shape[0], columns) if add_to is None else add_to
        mode = _GATED if self.gated else _PLAIN if add_to is None else _ADD
        _linear(x.contiguous().numpy(), self.packed, self.bias_array, out.numpy(), mode, torch.get_num_threads())
        return out


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch."""
    y = F.linear(x, weight, bias)
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


@njit(nogil=True, parallel=True, fastmath=True, cache=True)
def _linear(x: np.ndarray, packed: np.ndarray, bias: np.ndarray, out: np.ndarray, mode: int, threads: int) -> None:
    tokens, depth = x.shape
    width = out.shape[1]
    step = 2 if mode == _GATED else 1
    groups = packed.shape[0] // step
    span = step * PANEL
    x_at, packed_at = x.ctypes.data, packed.ctypes.data
    for thread in prange(threads):
        # Every panel is computed into this buffer and stored from there: that is where the bias, the residual, the gate
        # and the last panel's padding are dealt with.
        tile = np.zeros((tokens, span), np.float32)
        tile_at = tile.ctypes.data
        for group in range(groups * thread // threads, groups * (thread + 1) // threads):
            first = group * PANEL
            last = min(first + PANEL, width)
            tile[:] = 0.0
            for k in range(0, depth, _K_BLOCK):
                count = min(_K_BLOCK, depth - k)
                for half in range(step):
                    panel_at = packed_at + ((group * step + half) * depth + k) * PANEL * 4
                    for row in range(0, tokens, ROWS):
                        panel_tile(
                            min(ROWS, tokens - row),
                            x_at + (row * depth + k) * 4,
                            depth,
                            panel_at,
                            tile_at + (row * span + half * PANEL) * 4,
                            span,
                            count,
                        )
            for row in range(tokens):
                if mode == _GATED:
                    for i in range(last - first):
                        gate = tile[row, i]
                        out[row, first + i] = gate / (numba.float32(1.0) + exp(-gate)) * tile[row, PANEL + i]
                elif mode == _ADD:
                    for i in range(last - first):
                        out[row, first + i] += tile[row, i]
                else:
                    for i in range(last - first):
                        out[row, first + i] = tile[row, i]
                if bias.size:
                    for i in range(last - first):
                        out[row, first + i] += bias[first + i]
