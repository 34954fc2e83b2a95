"""GPTQ checkpoints, of 4 and 8 bits.

Codes are packed along the inputs, zeros along the outputs, the lowest bits first. Zeros are stored one too low, except
with checkpoint_format gptq_v2. Groups in another order than the inputs (act-order) are refused.
"""

from __future__ import annotations

import torch

from chairlift.core.errors import ModelError
from chairlift.core.values import Values
from chairlift.models.cut import Cut
from chairlift.models.formats.format import Stored, StoredFormat
from chairlift.models.formats.reading import Parts, group_size, read, read_scales, unpacked
from chairlift.ops.codes import Code
from chairlift.ops.grouped import Grouped
from chairlift.ops.weight import Weight


class Gptq(StoredFormat):
    """GPTQ matrices."""

    marks = "qweight"

    def __init__(self, source: Stored, bits: int, group: int, adds_one: bool, symmetric: bool) -> None:
        super().__init__(source)
        self._bits, self._group, self._adds_one, self._symmetric = bits, group, adds_one, symmetric

    @staticmethod
    def of(source: Stored, values: Values) -> Gptq:
        """Read the config."""
        bits = values.count("bits", most=8)
        if bits not in (4, 8):
            raise values.wrong("bits", "only GPTQ of 4 and 8 bits is read")
        version = values.text("checkpoint_format", "gptq")
        if version not in ("gptq", "gptq_v2"):
            raise values.wrong("checkpoint_format", "only gptq and gptq_v2 are read")
        group = values.count("group_size", -1, least=-1)
        return Gptq(source, bits, group, version == "gptq", values.flag("sym", True))

    @property
    def _code(self) -> Code:
        return Code.INT4 if self._bits == 4 else Code.INT8

    def shape(self, name: str) -> tuple[int, int]:
        """Return the outputs and inputs of a matrix."""
        rows, outputs = self.source.stored_shape(self.part(name, self.marks))
        return outputs, rows * 32 // self._bits

    def outline(self, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
        """Return a matrix on the meta device."""
        group = group_size("", self._group, inputs, self._bits)
        return Grouped.outline(self._code, outputs, inputs, group, dtype, torch.float16, zeros=not self._symmetric)

    def read(self, name: str, dtype: torch.dtype, device: torch.device, cut: Cut | None) -> Grouped:
        """Read a matrix, or a part of it."""
        (outputs, inputs), bits = self.shape(name), self._bits
        words, zeros, steps, order = (self.part(name, end) for end in ("qweight", "qzeros", "scales", "g_idx"))
        group = group_size(words, self._group, inputs, bits)
        groups, each = inputs // group, 32 // bits
        codes = read(self.source, words, (torch.int32,), (inputs // each, outputs))
        scales = read_scales(self.source, steps, (groups, outputs))
        packed = read(self.source, zeros, (torch.int32,), (groups, -(-outputs // each)))
        self._check_order(order, inputs, group)
        points = unpacked(packed.to(device), bits)[:, :outputs]
        points = (points + (1 if self._adds_one else 0)) & ((1 << bits) - 1)
        middle = None if self._symmetric and bool((points == 1 << bits - 1).all()) else points.t()
        plain = unpacked(codes.to(device).t(), bits)
        return Parts(words, self._code, plain, scales.to(device).t(), middle).cut(cut).weight(dtype)

    def _check_order(self, name: str, inputs: int, group: int) -> None:
        if not self.source.has(name):
            return
        order = read(self.source, name, (torch.int32, torch.int64), (inputs,))
        if not torch.equal(order.long(), torch.arange(inputs) // group):
            raise ModelError(
                f"tensor {name} puts inputs into groups in another order (act-order, desc_act), which is not read: "
                "use a checkpoint that was quantized with desc_act false"
            )
