"""What the products of compiled kernels on a CPU share: the fused operations as NumPy arrays, and the output."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from chairlift.ops.packed import ADD, GATED, PLAIN
from chairlift.ops.weight import Fused, Product

_NOTHING = np.empty(0, np.float32)


class CompiledProduct(Product):
    """A packed matrix with its fused operations; one kernel computes all of it."""

    is_compiled = True

    def __init__(self, format: str, panels: np.ndarray, outputs: int, fused: Fused) -> None:
        norm, bias, gate = fused.norm, fused.bias, fused.gate
        self.fused = fused
        self._format = format
        self._panels = panels
        self._width = outputs if gate is None else outputs // 2
        self._bias = _NOTHING if bias is None else bias.contiguous().numpy()
        self._scale = _NOTHING if norm is None else norm.weight.contiguous().numpy()
        self._eps = 0.0 if norm is None else norm.eps
        self._gate = (0.0, 0.0) if gate is None else (gate.linear, gate.cubic)

    @property
    def formats(self) -> dict[str, int]:
        """Bytes that one call reads, by format."""
        return {self._format: self._panels.nbytes}

    def __call__(self, x: np.ndarray, add_to: np.ndarray | None = None) -> np.ndarray:
        """Return the output; with `add_to`, add the output there in place and return that."""
        out = np.empty((x.shape[0], self._width), np.float32) if add_to is None else add_to
        mode = GATED if self.fused.gate else PLAIN if add_to is None else ADD
        normed = np.empty(x.shape, np.float32) if self._scale.size else x
        self._multiply(x, normed, out, mode)
        return out

    @abstractmethod
    def _multiply(self, x: np.ndarray, normed: np.ndarray, out: np.ndarray, mode: int) -> None:
        """Compute the output; `normed` is a buffer for the normed input, or x itself without a norm."""
