"""Linear layers: y = x @ W^T with a norm before it, and a bias, gate, norm or residual after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import numpy as np
import torch

from chairlift.ops.norm import Norm, add_norm
from chairlift.ops.weight import Fused, Gate, Weight

Reduce = Callable[[Any], Any]  # sums a partial output over all ranks


class Linear:
    """A linear layer of any weight format.

    With `reduce` it is row-parallel: its weight has a part of the inputs, so its product is summed over the ranks
    before the bias, the norm and the residual are added.
    """

    def __init__(
        self,
        weight: Weight,
        bias: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
        gate: Gate | None = None,
        output_norm: Norm | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        self.shape = weight.shape
        self._bias = bias if reduce is not None else None
        self._output_norm = output_norm  # applied before the residual is added
        self._reduce = reduce
        self._product = weight.prepare(Fused(norm, None if reduce is not None else bias, gate))

    @property
    def is_compiled(self) -> bool:
        """Whether it runs as a compiled CPU kernel, on NumPy arrays."""
        return self._product.is_compiled

    @property
    def formats(self) -> dict[str, int]:
        """Bytes of the weight that one call reads, by format."""
        return self._product.formats

    @property
    def nbytes(self) -> int:
        """Bytes of the weight that one call reads."""
        return self._product.nbytes

    @overload
    def __call__(self, x: np.ndarray, add_to: np.ndarray | None = None) -> np.ndarray: ...

    @overload
    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor: ...

    def __call__(self, x: Any, add_to: Any = None) -> Any:
        """Return the output; with `add_to`, add the output there in place and return that."""
        if self._reduce is None and self._output_norm is None:
            return self._multiply(x, add_to)
        y = self._multiply(x, None)
        if self._reduce is not None:
            y = self._reduce(y)
            if self._bias is not None:
                y += self._bias if isinstance(y, torch.Tensor) else self._bias.numpy()
        if self._output_norm is not None:
            return add_norm(y, self._output_norm, add_to)
        if add_to is None:
            return y
        add_to += y
        return add_to

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the output to `out`; not for compiled, gated or row-parallel layers."""
        return self._product.into(x, out)

    def _multiply(self, x: Any, add_to: Any) -> Any:
        if isinstance(x, np.ndarray) == self._product.is_compiled:
            return self._product(x, add_to)
        if isinstance(x, torch.Tensor):
            return torch.from_numpy(self._product(x.numpy(), None if add_to is None else add_to.numpy()))
        return self._product(torch.from_numpy(x), None if add_to is None else torch.from_numpy(add_to)).numpy()
