"""Panels: the layout of quantized weights that the CPU's integer micro-kernel (dot.py) reads, and packing into it.

A panel is PANEL adjacent outputs, and a run of blocks of groups of inputs. A block begins with its scales, minimums and
zeros; a group begins with the factors of these, where the format has any, then the upper bits of its codes and their
lower four bits, or codes of 8 bits. A vector holds four inputs of each of WIDTH outputs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import llvmlite.binding as llvm
import torch
from torch import Tensor

from chairlift.ops.tile import WIDTH


def _choose_dot() -> str:
    """Return the way in which this machine multiplies bytes: see dot.py."""
    features = llvm.get_host_cpu_features()
    if (WIDTH == 16 and features.get("avx512vnni")) or (WIDTH == 8 and features.get("avxvnni")):
        return "vnni"
    if (WIDTH == 16 and features.get("avx512bw")) or WIDTH == 8:
        return "pairs"
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    return "sdot" if is_arm and features.get("dotprod") else "plain"


# vpdpbusd of AVX512-VNNI or AVX-VNNI, sdot of ARM's dotprod, vpmaddubsw of AVX2 or AVX512BW, 16-bit multiply-adds
DOTS = ("vnni", "sdot", "pairs", "plain")
DOT = _choose_dot()
SIGNED = DOT in ("sdot", "pairs")  # whether codes of 8 bits are stored signed; vpdpbusd multiplies unsigned codes
# Rows and vectors of the largest tile: sums in int32 and in float32 beside the operands, in 32, 16 and 32 registers.
ROWS, VECTORS = {4: (4, 3), 8: (3, 2), 16: (6, 2)}[WIDTH]
PANEL = VECTORS * WIDTH  # adjacent outputs of a packed weight
SCALES = {"float16": 2, "bfloat16": 2, "float32": 4}  # bytes of a scale or minimum, by its dtype
_CHUNK = 1 << 20  # weights packed at a time: a few times their number is the memory that packing takes


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of some rows in blocks, in the order of the rows."""

    codes: Tensor  # [blocks, values], uint8
    scales: Tensor  # [blocks, 1], or [blocks, 2] with minimums: in the layout's dtype
    factors: Tensor | None = None  # [blocks, groups, 1 or 2], int8: of scale and minimum in each group
    zeros: Tensor | None = None  # [blocks, 1], uint8


@dataclass(frozen=True, slots=True)
class Panels:
    """The layout of one format. A weight is scale * (code - centre) + minimum, or scale * (code - zero)."""

    bits: int  # of a code: 4, 5, 6 or 8
    group: int  # inputs that are multiplied in integers: they share a scale, and so do the inputs of the layer
    has_minimum: bool = False
    centre: int = 0
    groups: int = 1  # in a block, a power of two
    has_factors: bool = False  # whether each group has factors (bytes) of the scale and minimum of its block
    scale: str = "float16"  # the dtype of the block's scale and minimum, one of SCALES
    has_zero: bool = False  # whether a block has a zero, which is a byte like a code
    table: tuple[int, ...] = ()  # the numbers of the 16 codes of 4 bits; empty: the codes themselves

    @property
    def key(self) -> int:
        """A number that identifies the layout in caches of compiled code."""
        return crc32(repr(self).encode())

    @property
    def most(self) -> int:
        """The largest absolute value of a code as it is multiplied."""
        return 128 if self.bits == 8 else max(self.table or ((1 << self.bits) - 1,))

    @property
    def values(self) -> int:
        """Inputs of a block."""
        return self.groups * self.group

    @property
    def scale_count(self) -> int:
        """The number of scales and minimums of one block and output."""
        return 2 if self.has_minimum else 1

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales and minimums at the start of a block, for each output."""
        return self.scale_count * SCALES[self.scale]

    @property
    def head_bytes(self) -> int:
        """Bytes at the start of a block, for each output."""
        return self.scale_bytes + self.has_zero

    @property
    def factor_bytes(self) -> int:
        """Bytes at the start of a group, for each output."""
        return self.scale_count * self.has_factors

    @property
    def group_bytes(self) -> int:
        """Bytes of a group, for each output."""
        return self.factor_bytes + self.group * self.bits // 8

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, for each output."""
        return self.head_bytes + self.groups * self.group_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a group of a row's inputs: codes, scale, sum."""
        return self.group + 8

    @property
    def sum_factor(self) -> int:
        """What a record's integer sum is multiplied by, negated; 0 if the record has a float sum."""
        return 1 if self.has_zero else self.centre

    def pack(self, numbers: Numbers, out: Tensor) -> None:
        """Write the blocks of PANEL * n outputs, row by row, to n panels [n, blocks, PANEL * block_bytes] of bytes."""
        panels, blocks, _ = out.shape
        scales, start, size = PANEL * self.scale_bytes, PANEL * self.head_bytes, PANEL * self.factor_bytes
        out[..., :scales] = self._spread(numbers.scales, panels, blocks).view(panels, blocks, -1)
        if numbers.zeros is not None:
            zeros = numbers.zeros ^ 128 if SIGNED and self.bits == 8 else numbers.zeros
            out[..., scales:start] = self._spread(zeros, panels, blocks).view(panels, blocks, -1)
        groups = out[..., start:].view(panels, blocks, self.groups, -1)
        if numbers.factors is not None:
            groups[..., :size] = self._spread(numbers.factors, panels, blocks).view(*groups.shape[:3], -1)
        groups[..., size:] = self._pack_codes(numbers.codes, panels, blocks).view(*groups.shape[:3], -1)

    def _spread(self, numbers: Tensor, panels: int, blocks: int) -> Tensor:
        """Return the bytes of [rows * blocks, ...] as [panels, blocks, ..., PANEL]."""
        by_row = numbers.view(panels, PANEL, blocks, *numbers.shape[1:])
        return by_row.movedim(1, -1).contiguous().view(torch.uint8)

    def _pack_codes(self, codes: Tensor, panels: int, blocks: int) -> Tensor:
        """Return the codes' bytes as [panels, blocks * groups, upper bits and lower bits]."""
        words = codes.view(torch.int32).view(panels, PANEL, blocks * self.groups, self.group // 4)
        words = words.movedim(1, -1).contiguous()  # four inputs of an output are a word, WIDTH words a vector
        if self.bits == 8:
            return (words ^ _bytes(128) if SIGNED else words).view(torch.uint8)
        low = words & _bytes(15)
        parts = [low[:, :, 0::2] | low[:, :, 1::2] << 4]
        if more := self.bits - 4:
            high = (words >> 4).bitwise_and_(_bytes((1 << more) - 1))
            for quad in range(1, self.group // 4):
                high[:, :, 0] |= high[:, :, quad] << more * quad
            parts.insert(0, high[:, :, :1])
        return torch.cat(parts, dim=2).view(torch.uint8)


def _bytes(value: int) -> int:
    """Return the int32 with the same value in each byte."""
    return int.from_bytes(bytes([value] * 4), "little", signed=True)


_CENTRE = 0 if SIGNED else 128
FORMATS: dict[str, Panels] = {
    "Q8_0": Panels(8, 32, centre=_CENTRE),
    "Q4_0": Panels(4, 32, centre=8),
    "Q4_1": Panels(4, 32, has_minimum=True),
    "Q5_0": Panels(5, 32, centre=16),
    "Q5_1": Panels(5, 32, has_minimum=True),
    "Q4_K": Panels(4, 32, has_minimum=True, groups=8, has_factors=True),
    "Q5_K": Panels(5, 32, has_minimum=True, groups=8, has_factors=True),
    "Q6_K": Panels(6, 16, centre=32, groups=16, has_factors=True),
}
"""The layout of each quantized GGUF format."""


def grouped_layout(bits: int, group: int, scale: str, has_zero: bool, table: tuple[int, ...] = ()) -> Panels:
    """Return the layout of codes of 4 or 8 bits with a scale for `group` inputs, and perhaps a zero or a table.

    Blocks are as large as groups up to 128 inputs; of larger groups, each block has the scale again.
    """
    groups = next(count for count in (4, 2, 1) if group % (32 * count) == 0)
    centre = 0 if has_zero else -min(table) if table else {4: 8, 8: _CENTRE}[bits]
    unsigned = tuple(number + centre for number in table)
    return Panels(bits, 32, centre=centre, groups=groups, scale=scale, has_zero=has_zero, table=unsigned)


def pack_rows(layout: Panels, shape: tuple[int, int], gated: bool, read: Callable[[Tensor], Numbers]) -> Tensor:
    """Return the panels [n, bytes] of a matrix, zero-padded; `read` returns its rows.

    In a gated weight each gate panel is followed by its up panel.
    """
    (outputs, inputs), parts = shape, 2 if gated else 1
    count = -(-outputs // parts // PANEL)  # panels of one part
    order = torch.arange(count * PANEL).view(count, 1, PANEL)
    order = torch.where(order < outputs // parts, order, -outputs)  # negative: padding
    order = torch.cat([order + part * (outputs // parts) for part in range(parts)], dim=1).view(-1)
    panels = torch.empty(parts * count, inputs // layout.values, PANEL * layout.block_bytes, dtype=torch.uint8)
    step = max(1, _CHUNK // (PANEL * inputs))
    for start in range(0, len(panels), step):
        part = panels[start : start + step]
        wanted = order[start * PANEL : (start + len(part)) * PANEL]
        numbers = read(wanted.clamp(min=0))
        if (wanted < 0).any():
            numbers.scales.view(len(wanted), -1)[wanted < 0] = 0
        layout.pack(numbers, part)
    return panels.view(parts * count, -1)
