"""Quantized weights: a matrix of 4- or 8-bit codes (codes.py) that is multiplied as it is.

On a GPU kernels convert codes to numbers in registers. On a CPU integer codes are multiplied by inputs of 8 bits, and
8-bit floats are converted to a dense matrix. The reference converts the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F

from chairlift.ops.codes import E2M1, Code, Coded, unpack
from chairlift.ops.dense import Dense, concatenate
from chairlift.ops.norm import rms_norm
from chairlift.ops.panel_product import PanelProduct
from chairlift.ops.panels import SCALES, Numbers, grouped_layout
from chairlift.ops.triton_found import HAS_TRITON
from chairlift.ops.weight import Fused, Product, Weight, gate_mul

_TABLE = tuple(int(2 * number) for number in E2M1)  # twice the numbers of 4-bit floats are integers


class Grouped(Coded, Weight):
    """A matrix of codes as a weight."""

    def __init__(
        self, code: Code, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__(code, codes, scales, zeros)
        self.dtype = dtype  # the model's

    @classmethod
    def outline(
        cls,
        code: Code,
        outputs: int,
        inputs: int,
        group: int,
        dtype: torch.dtype,
        scales: torch.dtype,
        *,
        zeros: bool = False,
    ) -> Self:
        """Return a matrix on the meta device, for its sizes; `scales` is the dtype of the scales."""
        shape, stored = (outputs, inputs), torch.int8
        if code.bits == 4:
            shape, stored = (outputs, inputs // 4), torch.int16
        steps = torch.empty(outputs, inputs // group, dtype=scales, device="meta")
        return cls(code, torch.empty(shape, dtype=stored, device="meta"), steps, steps if zeros else None, dtype)

    @property
    def format(self) -> str:
        """The format's name for users."""
        return self.code.name.lower()

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ W^T."""
        return F.linear(x, self.numbers().to(x.dtype))

    def can_join(self, other: Weight) -> bool:
        """Whether `join` takes the other weight: its codes and groups are of the same kind."""
        return (
            isinstance(other, Grouped)
            and type(other) is type(self)
            and (other.code, other.group) == (self.code, self.group)
            and (other.zeros is None) == (self.zeros is None)
            and other.scales.dtype == self.scales.dtype
        )

    def join(self, others: Sequence[Grouped]) -> Grouped:
        """Concatenate the outputs of this weight and the others."""
        every = (self, *others)
        zeros = [each.zeros for each in every if each.zeros is not None]
        return self._like(
            concatenate([each.codes for each in every]),
            concatenate([each.scales for each in every]),
            concatenate(zeros) if zeros else None,
        )

    def rows(self, first: int, last: int) -> Grouped:
        """Return outputs first..last."""
        zeros = None if self.zeros is None else self.zeros[first:last]
        return self._like(self.codes[first:last], self.scales[first:last], zeros)

    def columns(self, first: int, last: int) -> Grouped:
        """Return inputs first..last, which must be whole groups."""
        size, shrink = self.group, 4 if self.code.bits == 4 else 1
        if self.scales.shape[1] == 1:
            begin, end = 0, 1
        else:
            assert first % size == 0 and last % size == 0
            begin, end = first // size, last // size
        return self._like(
            self.codes[:, first // shrink : last // shrink].contiguous(),
            self.scales[:, begin:end].contiguous(),
            None if self.zeros is None else self.zeros[:, begin:end].contiguous(),
        )

    def pad(self, outputs: int) -> Grouped:
        """Return the matrix with rows of zeros after its own, `outputs` rows in all; a scale of 0 gives zeros."""
        missing = outputs - self.shape[0]
        if not missing:
            return self
        below = (0, 0, 0, missing)
        zeros = None if self.zeros is None else F.pad(self.zeros, below)
        return self._like(F.pad(self.codes, below), F.pad(self.scales, below), zeros)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Return some rows in the model's dtype, as an embedding does."""
        flat = ids.flatten()
        zeros = None if self.zeros is None else self.zeros[flat]
        found = self._like(self.codes[flat], self.scales[flat], zeros).numbers()
        return found.to(self.dtype).view(*ids.shape, -1)

    def dense(self) -> Dense:
        """Return the matrix in the model's dtype."""
        return Dense(self.numbers().to(self.dtype))

    def prepare(self, fused: Fused) -> Product:
        """Return the product that a linear layer runs: on a CPU, that of integers, or of the dense matrix."""
        if self.device.type != "cpu":
            return GroupedProduct(self, fused)
        scale, is_mixed = (
            str(self.scales.dtype).removeprefix("torch."),
            fused.gate is not None and fused.bias is not None,
        )
        is_integer = self.code is not Code.FP8 and self.group % 32 == 0 and scale in SCALES
        if self.dtype != torch.float32 or not is_integer or is_mixed:
            return self.dense().prepare(fused)
        table = _TABLE if self.code is Code.FP4 else ()
        layout = grouped_layout(self.code.bits, self.group, scale, self.zeros is not None, table)
        repeats = self.group // layout.values
        return PanelProduct(self.format, layout, self.shape, lambda rows: self._numbers(rows, repeats), fused)

    def _numbers(self, rows: torch.Tensor, repeats: int) -> Numbers:
        """Return some rows for the CPU's product, with unsigned codes and zeros; a group is `repeats` blocks."""
        codes = self.codes.index_select(0, rows)
        plain = unpack(codes).to(torch.uint8) if self.code.bits == 4 else codes.view(torch.uint8) ^ 128
        scales = self.scales.index_select(0, rows).repeat_interleave(repeats, dim=1).view(-1, 1)
        if self.code is Code.FP4:
            scales = scales / 2
        zeros = self.zeros
        if zeros is not None:
            least = -128 if self.code is Code.INT8 else 0
            whole = zeros.index_select(0, rows).to(torch.int16) - least
            zeros = whole.to(torch.uint8).repeat_interleave(repeats, dim=1).view(-1, 1)
        return Numbers(plain.view(len(scales), -1), scales, zeros=zeros)

    def _like(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Grouped:
        return type(self)(self.code, codes, scales, zeros, self.dtype)


class GroupedProduct(Product):
    """The product on a GPU, of codes that a kernel converts in registers."""

    weight: Grouped

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """Run one fused kernel for few rows, a product on tensor cores for some, and cuBLAS for many."""
        if not (x.is_cuda and HAS_TRITON):
            found: torch.Tensor = super().__call__(x, add_to)
            return found
        from chairlift.ops import grouped_cuda

        weight, fused = self.weight, self.fused
        if x.shape[0] <= grouped_cuda.FEW:
            scale, eps = (None, 0.0) if fused.norm is None else (fused.norm.weight, fused.norm.eps)
            gate = None if fused.gate is None else (fused.gate.linear, fused.gate.cubic)
            return grouped_cuda.linear(x, weight, fused.bias, scale, eps, gate, add_to)
        y = self._many(x if fused.norm is None else rms_norm(x, fused.norm))
        if fused.gate is not None:
            y = gate_mul(y, fused.gate)
        return y if add_to is None else add_to.add_(y)

    def _many(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with its bias for more rows than a fused kernel takes."""
        from chairlift.ops import grouped_cuda

        if x.shape[0] > grouped_cuda.SOME:
            return F.linear(x, grouped_cuda.dense(self.weight, x.dtype), self.fused.bias)
        return grouped_cuda.multiply(x, self.weight, self.fused.bias)
