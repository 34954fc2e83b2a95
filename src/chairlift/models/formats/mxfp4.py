"""MXFP4 checkpoints: 4-bit floats (e2m1), two in a byte, with a power of two (e8m0) for each 32 inputs.

gpt-oss and transformers store blocks of 16 bytes, `NAME_blocks` [outputs, blocks, 16] and `NAME_scales` [outputs,
blocks]; compressed-tensors stores rows, `weight_packed` [outputs, inputs / 2] and `weight_scale` [outputs, blocks].
Both have the earlier of two inputs in a byte's lower bits. Only linear layers are read: experts, which gpt-oss stores
in one tensor of a layer, are not.
"""

from __future__ import annotations

import torch

from chairlift.core.errors import ModelError
from chairlift.core.values import Values
from chairlift.models.cut import Cut
from chairlift.models.formats.format import Stored, StoredFormat
from chairlift.models.formats.reading import REFETCH, Parts, read
from chairlift.ops.codes import Code
from chairlift.ops.grouped import Grouped
from chairlift.ops.weight import Weight

GROUP = 32
PAIRS = (("weight_blocks", "weight_scales"), ("blocks", "scales"), ("weight_packed", "weight_scale"))
_NOT_A_NUMBER = 255
_DTYPE = torch.bfloat16  # of scales: it has every power of two that a scale can be


class Mxfp4(StoredFormat):
    """MXFP4 matrices."""

    @staticmethod
    def of(source: Stored, values: Values) -> Mxfp4:
        """Read the config: all files of this format are alike."""
        return Mxfp4(source)

    def covers(self, name: str) -> bool:
        """Whether a matrix has blocks."""
        return any(self.source.has(self.part(name, codes)) for codes, _ in PAIRS)

    @staticmethod
    def part(name: str, end: str) -> str:
        """Return the name of one of a matrix's tensors: gpt-oss's end in _blocks and _scales."""
        return f"{name.removesuffix('.weight')}{'.' if end.startswith('weight') else '_'}{end}"

    def shape(self, name: str) -> tuple[int, int]:
        """Return the outputs and inputs of a matrix."""
        codes, _ = self._names(name)
        match self.source.stored_shape(codes):
            case (outputs, blocks, 16):
                return outputs, blocks * GROUP
            case (outputs, pairs) if pairs % 16 == 0:
                return outputs, pairs * 2
            case shape:
                raise ModelError(
                    f"tensor {codes} has shape {list(shape)}, but [outputs, blocks, 16] or [outputs, inputs / 2] was "
                    f"expected: {REFETCH}"
                )

    def outline(self, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
        """Return a matrix on the meta device."""
        if inputs % GROUP:
            raise ModelError(f"a matrix has {inputs:,} inputs, which blocks of {GROUP} do not divide")
        return Grouped.outline(Code.FP4, outputs, inputs, GROUP, dtype, _DTYPE)

    def read(self, name: str, dtype: torch.dtype, device: torch.device, cut: Cut | None) -> Grouped:
        """Read a matrix, or a part of it."""
        (outputs, inputs), (codes, scales) = self.shape(name), self._names(name)
        groups, form = inputs // GROUP, (torch.uint8,)
        pairs = read(self.source, codes, form, (outputs, groups, 16), (outputs, inputs // 2)).to(device)
        powers = read(self.source, scales, form, (outputs, groups)).to(device)
        if bool((powers == _NOT_A_NUMBER).any()):
            raise ModelError(f"tensor {scales} has scales that are not finite numbers: {REFETCH}")
        apart = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(outputs, inputs)
        # The power is bfloat16's exponent; the least one, 2**-127, is a subnormal number there.
        steps = torch.where(powers == 0, 1 << 6, powers.to(torch.int16) << 7).to(torch.int16).view(_DTYPE)
        return Parts(codes, Code.FP4, apart, steps, None).cut(cut).weight(dtype)

    def _names(self, name: str) -> tuple[str, str]:
        codes, scales = next(pair for pair in PAIRS if self.source.has(self.part(name, pair[0])))
        return self.part(name, codes), self.part(name, scales)
