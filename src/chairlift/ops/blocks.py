"""Quantized weights in the blocks of a GGUF file, multiplied as they are on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from chairlift.ops.block_codes import UNPACK, dequantize
from chairlift.ops.block_formats import BlockFormat
from chairlift.ops.panel_product import PanelProduct
from chairlift.ops.panels import FORMATS, Numbers
from chairlift.ops.weight import Fused, Product, Weight


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

    @property
    def format(self) -> str:
        """The format's name for users."""
        return self.form.name

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
        return PanelProduct(self.form.name, FORMATS[self.form.name], self.shape, self._read, fused)

    def _read(self, rows: torch.Tensor) -> Numbers:
        raw = self.raw.index_select(0, rows).view(-1, self.form.nbytes)
        self._release()  # after each part of the matrix: those of a whole embedding can be 200 MB of memory
        return numbers_of(raw, self.form)


def numbers_of(raw: torch.Tensor, form: BlockFormat) -> Numbers:
    """Return the numbers of blocks [n, bytes]."""
    found = UNPACK[form.name](raw)
    pair = (found.scales,) if found.minimums is None else (found.scales, found.minimums)
    if found.units is None:
        return Numbers(found.codes, torch.cat(pair, dim=1))
    return Numbers(found.codes, found.units, torch.stack(pair, dim=-1))
