"""Quantization while a model is loaded: each matrix of the layers is rounded as soon as it has been read.

Embedding and head keep their dtype. Numbers are rounded to the nearest code; nothing is calibrated.
"""

from __future__ import annotations

import torch

from chairlift.models.formats.format import Format
from chairlift.ops.codes import MIDDLE, PACKED, Code, pack
from chairlift.ops.dense import Dense
from chairlift.ops.fp8 import DTYPE, Fp8
from chairlift.ops.grouped import Grouped
from chairlift.ops.weight import Weight

KINDS = {"fp8": Code.FP8, "int8": Code.INT8, "int4": Code.INT4}  # by the setting's values
GROUP = 128  # inputs with a common scale, or the largest of 64 and 32 that divides a matrix


class OnLoad(Format):
    """The format that the setting `quantization` chooses."""

    def __init__(self, code: Code) -> None:
        self.code = code

    @property
    def has_cpu_product(self) -> bool:  # type: ignore[override]
        """Whether a CPU multiplies it as it is."""
        return self.code is not Code.FP8

    @property
    def multiplies_8_bits(self) -> bool:  # type: ignore[override]
        """Whether prompts are multiplied in 8 bits."""
        return self.code is Code.FP8 and not self.expands

    def covers(self, name: str) -> bool:
        """Whether a matrix is quantized: those of the layers are."""
        return name.startswith("model.layers.")

    def outline(self, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
        """Return a matrix on the meta device."""
        if self.code is Code.FP8:
            return Fp8.outline(self.code, outputs, inputs, inputs, dtype, torch.float32)
        group = group_for(inputs)
        if not group:
            return Dense(torch.empty(outputs, inputs, dtype=dtype, device="meta"))
        return Grouped.outline(self.code, outputs, inputs, group, dtype, dtype)


def quantize(matrix: torch.Tensor, code: Code) -> Weight:
    """Round a matrix to codes; a matrix with inputs that are not whole groups stays dense."""
    if code is Code.FP8:
        return _quantize_fp8(matrix)
    group = group_for(matrix.shape[1])
    return _quantize_groups(matrix, code, group) if group else Dense(matrix)


def group_for(inputs: int) -> int:
    """Return the inputs of a group; 0 if the inputs are not whole groups."""
    return next((size for size in (GROUP, GROUP // 2, PACKED) if inputs % size == 0), 0)


def _quantize_fp8(matrix: torch.Tensor) -> Fp8:
    wide = matrix.float()
    scales = wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / Code.FP8.most
    return Fp8(Code.FP8, (wide / scales).to(DTYPE).view(torch.int8), scales, None, matrix.dtype)


def _quantize_groups(matrix: torch.Tensor, code: Code, group: int) -> Grouped:
    """Choose each group's scale so that its largest number has the largest code.

    4-bit codes are -8 to 7, so a scale has the sign that makes the largest number -8. Scales are rounded to the
    model's dtype before they divide.
    """
    wide = matrix.float().view(matrix.shape[0], -1, group)
    if code is Code.INT4:
        largest = wide.gather(-1, wide.abs().argmax(-1, keepdim=True)).squeeze(-1)
        scales = (largest / -MIDDLE).to(matrix.dtype)
    else:
        scales = (wide.abs().amax(-1) / code.most).to(matrix.dtype)
    steps = scales.float().unsqueeze(-1)
    codes = torch.where(steps == 0, 0, wide / steps).round_().flatten(1)
    if code is Code.INT4:
        return Grouped(code, pack(codes.clamp_(-MIDDLE, MIDDLE - 1).add_(MIDDLE)), scales, None, matrix.dtype)
    return Grouped(code, codes.clamp_(-code.most, code.most).to(torch.int8), scales, None, matrix.dtype)
