"""Checkpoints in FP8 (quant_method fp8 and fbgemm_fp8): e4m3 matrices with a scale for all, each output, or each block.

Activations are quantized while the model runs, each row by its largest number: scales of activations in the files
(activation_scheme static) are not used.
"""

from __future__ import annotations

import torch

from chairlift.core.errors import ModelError
from chairlift.core.values import Values
from chairlift.models.cut import Cut
from chairlift.models.formats.format import Stored, StoredFormat
from chairlift.models.formats.reading import fp8_weight, read, read_scales
from chairlift.ops.codes import Code
from chairlift.ops.fp8 import DTYPE, Fp8
from chairlift.ops.grouped import Grouped
from chairlift.ops.weight import Weight

SCALES = ("weight_scale_inv", "weight_scale")  # both are factors


class Fp8Format(StoredFormat):
    """FP8 matrices."""

    has_cpu_product = False

    def __init__(self, source: Stored, block: int) -> None:
        """`block` is the size of blocks with a scale of their own, 0 if there are none."""
        super().__init__(source)
        self._block = block

    @staticmethod
    def of(source: Stored, values: Values) -> Fp8Format:
        """Read the config."""
        shape = values.numbers("weight_block_size")
        if shape and (len(shape) != 2 or shape[0] != shape[1] or shape[0] not in (32, 64, 128)):
            raise values.wrong("weight_block_size", "only square blocks of 32, 64 or 128 are read, such as [128, 128]")
        return Fp8Format(source, int(shape[0]) if shape else 0)

    @property
    def multiplies_8_bits(self) -> bool:  # type: ignore[override]
        """Whether prompts are multiplied in 8 bits: not with scales of blocks."""
        return not self._block and not self.expands

    def covers(self, name: str) -> bool:
        """Whether a matrix has scales."""
        return any(self.source.has(self.part(name, each)) for each in SCALES)

    def shape(self, name: str) -> tuple[int, int]:
        """Return the outputs and inputs of a matrix."""
        outputs, inputs = self.source.stored_shape(name)
        return outputs, inputs

    def outline(self, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
        """Return a matrix on the meta device."""
        if self._block:
            return Grouped.outline(Code.FP8, outputs, inputs, self._block, dtype, torch.float32)
        return Fp8.outline(Code.FP8, outputs, inputs, inputs, dtype, torch.float32)

    def read(self, name: str, dtype: torch.dtype, device: torch.device, cut: Cut | None) -> Grouped:
        """Read a matrix, or a part of it."""
        shape = outputs, inputs = self.shape(name)
        codes = read(self.source, name, (DTYPE,), shape)
        scale = next(each for each in (self.part(name, end) for end in SCALES) if self.source.has(each))
        if self._block:
            if inputs % self._block:
                raise ModelError(f"tensor {name} has {inputs:,} inputs, which blocks of {self._block} do not divide")
            blocks = -(-outputs // self._block), inputs // self._block
            scales = read_scales(self.source, scale, blocks)
        else:
            scales = read_scales(self.source, scale, (), (1,), (1, 1), (outputs,), (outputs, 1))
        return fp8_weight(name, codes, scales, dtype, device, cut)
