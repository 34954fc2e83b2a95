"""Quantized weights in the blocks of a GGUF file, multiplied as they are on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from chairlift.ops.block_codes import UNPACK, dequantize
from chairlift.ops.block_formats import BlockFormat
from chairlift.ops.dot import compile_tile
from chairlift.ops.packed import ADD, GATED, PLAIN
from chairlift.ops.panels import FORMATS, PANEL
from chairlift.ops.quantized import multiply
from chairlift.ops.weight import Fused, Product, Weight

_NOTHING = np.empty(0, np.float32)
_CHUNK = 1 << 20  # weights packed at a time: a few times their number is the memory that packing takes


class Blocks(Weight):
    """A matrix in one of GGUF's block formats: bytes [outputs, blocks, bytes of a block]."""

    def __init__(self, raw: torch.Tensor, form: BlockFormat, release: Callable[[], None] = lambda: None) -> None:
        self.raw, self.form = raw, form
        self._release = release  # gives back the pages of the mapped file that `raw` is a view of

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        return self.raw.shape[0], self.raw.shape[1] * self.form.values

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.raw.nbytes

    @property
    def device(self) -> torch.device:
        """The device that the matrix is on."""
        return self.raw.device

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ W^T with dequantized weights and unquantized inputs."""
        return F.linear(x, dequantize(self.raw.reshape(-1), self.form, x.dtype).view(self.shape))

    def can_join(self, other: Weight) -> bool:
        """Whether the other weight has the same block format."""
        return isinstance(other, Blocks) and other.form == self.form

    def join(self, others: Sequence[Blocks]) -> Blocks:
        """Concatenate the outputs of this weight and the others."""
        if not others:
            return self
        whole = Blocks(torch.cat([self.raw, *(other.raw for other in others)]), self.form)
        for each in (self, *others):
            each._release()
        return whole

    def rows(self, first: int, last: int) -> Blocks:
        """Return outputs first..last."""
        return Blocks(self.raw[first:last], self.form)

    def columns(self, first: int, last: int) -> Blocks:
        """Return inputs first..last, which must be whole blocks."""
        size = self.form.values
        assert first % size == 0 and last % size == 0, "a block has one scale: columns are cut at its ends"
        return Blocks(self.raw[:, first // size : last // size].contiguous(), self.form)

    def pad(self, outputs: int) -> Blocks:
        """Return the matrix with rows of zeros after its own, `outputs` rows in all."""
        missing = outputs - self.raw.shape[0]
        return Blocks(F.pad(self.raw, (0, 0, 0, 0, 0, missing)), self.form) if missing else self

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Return some rows in float32, as an embedding does."""
        rows = F.embedding(ids, self.raw.flatten(1))
        return dequantize(rows.view(-1), self.form, torch.float32).view(*ids.shape, -1)

    def prepare(self, fused: Fused) -> Product:
        """Return the product that a linear layer runs."""
        product = BlocksProduct(self, fused)
        self._release()
        return product


class BlocksProduct(Product):
    """The product on a CPU: one compiled kernel over packed blocks and inputs of 8 bits, on NumPy arrays."""

    is_compiled = True

    def __init__(self, weight: Blocks, fused: Fused) -> None:
        norm, bias, gate = fused.norm, fused.bias, fused.gate
        assert gate is None or bias is None, "no model has a bias inside of its gate"
        self.fused = fused
        self._layout = FORMATS[weight.form.name]
        self._tile = compile_tile(self._layout)
        self._panels = pack_blocks(weight, gate is not None).numpy()
        self._width = weight.shape[0] if gate is None else weight.shape[0] // 2
        self._bias = _NOTHING if bias is None else bias.contiguous().numpy()
        self._scale = _NOTHING if norm is None else norm.weight.contiguous().numpy()
        self._eps = 0.0 if norm is None else norm.eps
        self._gate = (0.0, 0.0) if gate is None else (gate.linear, gate.cubic)

    @property
    def nbytes(self) -> int:
        """Bytes that one call reads."""
        return self._panels.nbytes

    def __call__(self, x: np.ndarray, add_to: np.ndarray | None = None) -> Any:
        """Return the output; with `add_to`, add the output there in place and return that."""
        rows, layout = x.shape[0], self._layout
        out = np.empty((rows, self._width), np.float32) if add_to is None else add_to
        mode = GATED if self.fused.gate else PLAIN if add_to is None else ADD
        normed = np.empty(x.shape, np.float32) if self._scale.size else x
        records = np.empty(x.size // layout.group * layout.record_bytes, np.uint8)
        inputs = x, self._scale, self._eps, normed, layout.group, layout.centre, records
        multiply(torch.get_num_threads(), self._tile, *inputs, self._panels, self._bias, out, mode, self._gate)
        return out


def pack_blocks(weight: Blocks, gated: bool) -> torch.Tensor:
    """Return panels [n, bytes], zero-padded; in a gated weight each gate panel is followed by its up panel."""
    layout, raw, outputs = FORMATS[weight.form.name], weight.raw, weight.shape[0]
    parts = 2 if gated else 1
    count = -(-outputs // parts // PANEL)  # panels of one part
    order = torch.arange(count * PANEL).view(count, 1, PANEL)
    order = torch.where(order < outputs // parts, order, -outputs)  # negative: padding
    order = torch.cat([order + part * (outputs // parts) for part in range(parts)], dim=1).view(-1)
    blocks = raw.shape[1]
    panels = torch.empty(parts * count, blocks, PANEL * layout.block_bytes, dtype=torch.uint8)
    step = max(1, _CHUNK // (PANEL * weight.shape[1]))
    for start in range(0, len(panels), step):
        part = panels[start : start + step]
        wanted = order[start * PANEL : (start + len(part)) * PANEL]
        chunk = raw.index_select(0, wanted.clamp(min=0))
        if (wanted < 0).any():
            chunk[wanted < 0] = 0
        layout.pack(UNPACK[weight.form.name](chunk.view(-1, weight.form.nbytes)), part)
    return panels.view(parts * count, -1)
