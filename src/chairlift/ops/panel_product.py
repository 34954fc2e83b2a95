"""The product of quantized weights on a CPU: one compiled kernel over packed panels and inputs of 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from chairlift.ops.dot import compile_tile
from chairlift.ops.packed import ADD, GATED, PLAIN
from chairlift.ops.panels import Numbers, Panels, pack_rows
from chairlift.ops.quantized import multiply
from chairlift.ops.weight import Fused, Product

_NOTHING = np.empty(0, np.float32)


class PanelProduct(Product):
    """The product of one weight, on NumPy arrays."""

    is_compiled = True

    def __init__(
        self,
        format: str,
        layout: Panels,
        shape: tuple[int, int],
        read: Callable[[torch.Tensor], Numbers],
        fused: Fused,
    ) -> None:
        """`read` returns the numbers of some rows of the matrix, which is [outputs, inputs]."""
        norm, bias, gate = fused.norm, fused.bias, fused.gate
        assert gate is None or bias is None, "no model has a bias inside of its gate"
        self.fused = fused
        self._format = format
        self._layout = layout
        self._tile = compile_tile(layout)
        self._panels = pack_rows(layout, shape, gate is not None, read).numpy()
        self._width = shape[0] if gate is None else shape[0] // 2
        self._bias = _NOTHING if bias is None else bias.contiguous().numpy()
        self._scale = _NOTHING if norm is None else norm.weight.contiguous().numpy()
        self._eps = 0.0 if norm is None else norm.eps
        self._gate = (0.0, 0.0) if gate is None else (gate.linear, gate.cubic)

    @property
    def formats(self) -> dict[str, int]:
        """Bytes that one call reads, by format."""
        return {self._format: self._panels.nbytes}

    def __call__(self, x: np.ndarray, add_to: np.ndarray | None = None) -> Any:
        """Return the output; with `add_to`, add the output there in place and return that."""
        rows, layout = x.shape[0], self._layout
        out = np.empty((rows, self._width), np.float32) if add_to is None else add_to
        mode = GATED if self.fused.gate else PLAIN if add_to is None else ADD
        normed = np.empty(x.shape, np.float32) if self._scale.size else x
        records = np.empty(x.size // layout.group * layout.record_bytes, np.uint8)
        inputs = x, self._scale, self._eps, normed, layout.group, layout.sum_factor, records
        multiply(torch.get_num_threads(), self._tile, *inputs, self._panels, self._bias, out, mode, self._gate)
        return out
