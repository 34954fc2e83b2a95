"""The product of quantized weights on a CPU: one compiled kernel over packed panels and inputs of 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from chairlift.ops.assistant import assistant
from chairlift.ops.compiled import CompiledProduct
from chairlift.ops.dot import compile_tile
from chairlift.ops.panels import Numbers, Panels, pack_rows
from chairlift.ops.quantized import items_of, multiply, multiply_shared, quantize_rows
from chairlift.ops.weight import Fused


class PanelProduct(CompiledProduct):
    """The product of one weight, on NumPy arrays."""

    def __init__(
        self,
        format: str,
        layout: Panels,
        shape: tuple[int, int],
        read: Callable[[torch.Tensor], Numbers],
        fused: Fused,
    ) -> None:
        """`read` returns the numbers of some rows of the matrix, which is [outputs, inputs]."""
        assert fused.gate is None or fused.bias is None, "no model has a bias inside of its gate"
        super().__init__(format, pack_rows(layout, shape, fused.gate is not None, read).numpy(), shape[0], fused)
        self._layout = layout
        self._tile = compile_tile(layout)

    def _multiply(self, x: np.ndarray, normed: np.ndarray, out: np.ndarray, mode: int) -> None:
        layout = self._layout
        records = np.empty(x.size // layout.group * layout.record_bytes, np.uint8)
        inputs = x, self._scale, self._eps, normed, layout.group, layout.sum_factor, records
        rest = self._panels, self._bias, out, mode, self._gate
        if (helper := assistant()) is None:
            multiply(torch.get_num_threads(), self._tile, *inputs, *rest)
            return
        quantize_rows(*inputs)
        items, groups = items_of(len(x), self._panels, mode), x.shape[1] // layout.group
        helper.share(multiply_shared, items, self._tile, len(x), groups, records, *rest)
