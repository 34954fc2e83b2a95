"""Checkpoints of compressed-tensors: packed integers of 4 and 8 bits, int8, and FP8.

Quantized activations (W8A8) are not used with integers: weights are multiplied by 16-bit rows. With FP8 rows are
quantized while the model runs.
"""

from __future__ import annotations

import torch

from chairlift.core.errors import ModelError
from chairlift.core.values import Values, show
from chairlift.models.cut import Cut
from chairlift.models.formats.format import Stored, StoredFormat
from chairlift.models.formats.fp8 import Fp8Format
from chairlift.models.formats.mxfp4 import Mxfp4
from chairlift.models.formats.reading import Parts, group_size, read, read_scales, unpacked
from chairlift.ops.codes import Code
from chairlift.ops.grouped import Grouped
from chairlift.ops.weight import Weight

FORMATS = ("mxfp4-pack-quantized", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


class Compressed(StoredFormat):
    """Integers of 4 and 8 bits: packed in int32 words, or plain int8."""

    def __init__(self, source: Stored, bits: int, group: int, symmetric: bool, packed: bool) -> None:
        """`group` is the number of inputs of a group, -1 for whole rows."""
        super().__init__(source)
        self._bits, self._group, self._symmetric, self._packed = bits, group, symmetric, packed
        self.marks = "weight_packed" if packed else "weight_scale"

    @property
    def _code(self) -> Code:
        return Code.INT4 if self._bits == 4 else Code.INT8

    def shape(self, name: str) -> tuple[int, int]:
        """Return the outputs and inputs of a matrix."""
        if not self._packed:
            outputs, inputs = self.source.stored_shape(name)
            return outputs, inputs
        shape = read(self.source, self.part(name, "weight_shape"), (torch.int32, torch.int64), (2,)).tolist()
        return shape[0], shape[1]

    def outline(self, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
        """Return a matrix on the meta device."""
        group = group_size("", self._group, inputs, self._bits)
        return Grouped.outline(self._code, outputs, inputs, group, dtype, dtype, zeros=not self._symmetric)

    def read(self, name: str, dtype: torch.dtype, device: torch.device, cut: Cut | None) -> Grouped:
        """Read a matrix, or a part of it."""
        (outputs, inputs), bits = self.shape(name), self._bits
        group = group_size(name, self._group, inputs, bits)
        groups, each = inputs // group, 32 // bits
        steps, points, order = (self.part(name, f"weight_{end}") for end in ("scale", "zero_point", "g_idx"))
        if self.source.has(order) and bool((self.source.stored(order) != torch.arange(inputs) // group).any()):
            raise ModelError(
                f"tensor {order} puts inputs into groups in another order (actorder), which is not read: use a "
                "checkpoint that was quantized without actorder, or with actorder weight"
            )
        scales = read_scales(self.source, steps, (outputs, groups), *([(outputs,), (1,)] if groups == 1 else []))
        scales = scales.reshape(-1, groups).expand(outputs, groups)
        if self._packed:
            words = read(self.source, self.part(name, "weight_packed"), (torch.int32,), (outputs, -(-inputs // each)))
            codes = unpacked(words.to(device), bits)[:, :inputs]
        else:
            codes = read(self.source, name, (torch.int8,), (outputs, inputs)).to(device).view(torch.uint8) ^ 0x80
        zeros = None if self._symmetric else self._zeros(points, outputs, groups, device)
        return Parts(name, self._code, codes, scales.to(device), zeros).cut(cut).weight(dtype)

    def _zeros(self, name: str, outputs: int, groups: int, device: torch.device) -> torch.Tensor:
        """Return the zeros as unsigned codes: packed along the outputs, or int8."""
        each = 32 // self._bits
        if self._packed:
            words = read(self.source, name, (torch.int32,), (-(-outputs // each), groups)).to(device)
            return unpacked(words.t(), self._bits)[:, :outputs].t()
        plain = read(self.source, name, (torch.int8,), (outputs, groups)).to(device)
        return plain.view(torch.uint8) ^ 0x80


def of(source: Stored, values: Values) -> StoredFormat:
    """Read the config, which must have one scheme for all quantized matrices."""
    groups = values.part("config_groups")
    schemes = [groups.part(name) for name in groups.items()]
    if len(schemes) != 1:
        raise values.wrong("config_groups", "only checkpoints with one group are read")
    weights = schemes[0].part("weights")
    form = values.text("format", "") or schemes[0].text("format", "")
    if form not in FORMATS:
        raise ModelError(
            f"{values.file}: compressed-tensors format {show(form)} is not read: supported are {', '.join(FORMATS)}"
        )
    kind, bits = weights.text("type", "int"), weights.count("num_bits", most=8)
    strategy = weights.text("strategy", "tensor")
    if form == "mxfp4-pack-quantized":
        return Mxfp4(source)
    if kind == "float":
        if bits != 8 or strategy not in ("tensor", "channel", "block"):
            raise weights.wrong("strategy", "FP8 is read with scales per tensor, channel or block")
        block = weights.numbers("block_structure") if strategy == "block" else []
        if block and block not in ([128, 128], [64, 64], [32, 32]):
            raise weights.wrong("block_structure", "only square blocks of 32, 64 or 128 are read, such as [128, 128]")
        return Fp8Format(source, int(block[0]) if block else 0)
    if bits not in (4, 8) or strategy not in ("tensor", "channel", "group"):
        raise weights.wrong("strategy", "integers of 4 and 8 bits are read with scales per tensor, channel or group")
    group = weights.count("group_size", -1, least=-1) if strategy == "group" else -1
    packed = form == "pack-quantized"
    if bits == 4 and not packed:
        raise ModelError(f"{values.file}: 4-bit integers of format {form} are not read: use pack-quantized")
    return Compressed(source, bits, group, weights.flag("symmetric", True), packed)
