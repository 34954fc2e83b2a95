"""AWQ checkpoints of 4 bits, packed for AWQ's gemm kernel.

Codes and zeros are packed along the outputs, eight in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import torch

from chairlift.core.values import Values
from chairlift.models.cut import Cut
from chairlift.models.formats.format import Stored, StoredFormat
from chairlift.models.formats.reading import Parts, group_size, read, read_scales, unpacked
from chairlift.ops.codes import Code
from chairlift.ops.grouped import Grouped
from chairlift.ops.weight import Weight

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each of eight outputs in its word


class Awq(StoredFormat):
    """AWQ matrices."""

    marks = "qweight"

    def __init__(self, source: Stored, group: int) -> None:
        super().__init__(source)
        self._group = group

    @staticmethod
    def of(source: Stored, values: Values) -> Awq:
        """Read the config."""
        if values.count("bits", values.count("w_bit", 4)) != 4:
            raise values.wrong("bits", "only AWQ of 4 bits is read")
        if values.text("version", "gemm").lower() != "gemm":
            raise values.wrong("version", "only the gemm version of AWQ is read")
        if not values.flag("zero_point", True):
            raise values.wrong("zero_point", "only AWQ with zero points is read")
        return Awq(source, values.count("group_size", values.count("q_group_size", 128), least=-1))

    def shape(self, name: str) -> tuple[int, int]:
        """Return the outputs and inputs of a matrix."""
        inputs, words = self.source.stored_shape(self.part(name, self.marks))
        return words * 8, inputs

    def outline(self, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
        """Return a matrix on the meta device."""
        group = group_size("", self._group, inputs, 4)
        return Grouped.outline(Code.INT4, outputs, inputs, group, dtype, torch.float16, zeros=True)

    def read(self, name: str, dtype: torch.dtype, device: torch.device, cut: Cut | None) -> Grouped:
        """Read a matrix, or a part of it."""
        outputs, inputs = self.shape(name)
        words, zeros, steps = (self.part(name, end) for end in ("qweight", "qzeros", "scales"))
        group = group_size(words, self._group, inputs, 4)
        codes = read(self.source, words, (torch.int32,), (inputs, outputs // 8))
        points = read(self.source, zeros, (torch.int32,), (inputs // group, outputs // 8))
        scales = read_scales(self.source, steps, (inputs // group, outputs))
        plain, middle = (_ordered(each.to(device)).t().contiguous() for each in (codes, points))
        return Parts(words, Code.INT4, plain, scales.to(device).t(), middle).cut(cut).weight(dtype)


def _ordered(words: torch.Tensor) -> torch.Tensor:
    """Return the codes of words [rows, outputs / 8] in the order of the outputs."""
    return unpacked(words, 4).view(words.shape[0], -1, 8)[:, :, PLACES].flatten(1)
