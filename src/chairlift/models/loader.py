"""Load a Decoder onto its device, from a checkpoint or with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from chairlift.core.errors import ModelError, SettingsError
from chairlift.models.building import Parts, Split
from chairlift.models.config import ModelConfig
from chairlift.models.cut import Cut
from chairlift.models.decoder import Decoder
from chairlift.models.division import columns_of_rank, of_one_rank, rows_of_rank
from chairlift.models.families import build_decoder, outline, record
from chairlift.models.formats.on_load import OnLoad, quantize
from chairlift.ops.dense import Dense
from chairlift.ops.group import Group
from chairlift.ops.grouped import Grouped
from chairlift.ops.vocabulary import part_size
from chairlift.ops.weight import Weight

Progress = Callable[[int], None]  # called with the bytes of each loaded tensor


class TensorSource(Protocol):
    """Returns a model's tensors by their Hugging Face names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it; raise ModelError if it does not exist."""
        ...

    def tensor(self, name: str, dtype: torch.dtype | None = None, *, cut: Cut | None = None) -> torch.Tensor:
        """Read a tensor or a part of it, in `dtype` if given."""
        ...

    def weight(self, name: str, dtype: torch.dtype, device: torch.device, *, cut: Cut | None = None) -> Weight:
        """Read a matrix or a part of it in the format that products with it use; `dtype` is the model's."""
        ...


class RandomTensors:
    """Random weights of the config's shapes, for measuring speed."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        _, self._shapes = outline(config)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that the config implies."""
        return self._shapes[name]

    def tensor(self, name: str, dtype: torch.dtype | None = None, *, cut: Cut | None = None) -> torch.Tensor:
        """Return ones for norms, and small normal numbers for biases and matrices, as in an untrained model.

        A part is cut from the whole tensor, so that the model does not depend on the number of ranks.
        """
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self._device)
        whole = torch.empty(shape, dtype=dtype, device=self._device).normal_(0, 0.02, generator=self._generator)
        return whole if cut is None else cut.of(whole).clone()  # a view would keep the whole tensor in memory

    def weight(self, name: str, dtype: torch.dtype, device: torch.device, *, cut: Cut | None = None) -> Weight:
        """Return a dense matrix."""
        return Dense(self.tensor(name, dtype, cut=cut).to(device))


class Quantizing:
    """A source that rounds each matrix as soon as it is read, by the setting `quantization`."""

    def __init__(self, source: TensorSource, format: OnLoad) -> None:
        self._source, self._format = source, format

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._source.shape(name)

    def tensor(self, name: str, dtype: torch.dtype | None = None, *, cut: Cut | None = None) -> torch.Tensor:
        """Read a tensor."""
        return self._source.tensor(name, dtype, cut=cut)

    def weight(self, name: str, dtype: torch.dtype, device: torch.device, *, cut: Cut | None = None) -> Weight:
        """Read a matrix and round it on its device."""
        read = self._source.weight(name, dtype, device, cut=cut)
        if not self._format.covers(name):
            return read
        if not isinstance(read, Dense):
            raise SettingsError(
                f"quantization is set, but the checkpoint's {name} is quantized already: leave quantization out"
            )
        rounded = quantize(read.tensor, self._format.code)
        return rounded.dense() if self._format.expands and isinstance(rounded, Grouped) else rounded


class LoadingTake:
    """Reads tensors, or this rank's parts of them, from a source and copies them to a device."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        group: Group | None = None,
        whole: dict[str, Parts] | None = None,
    ) -> None:
        self.group = group
        self._whole = whole or {}  # outputs of the matrices and biases that ranks split, of all ranks together
        self._source, self._dtype, self._device, self._progress = source, dtype, device, progress

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a whole tensor."""
        return self._read(name, None, dtype)

    def weight(self, name: str, outputs: Parts, inputs: int, split: Split) -> Weight:
        """Return a matrix, or this rank's part of it."""
        if split is Split.OUTPUTS or self.group is None:
            return self._read_weight(name, self._rows(name, outputs))
        return self._read_weight(name, columns_of_rank(inputs, self.group.rank))

    def bias(self, name: str, outputs: Parts) -> torch.Tensor:
        """Return a bias, or this rank's part of it."""
        return self._read(name, self._rows(name, outputs))

    def vocabulary(self, name: str, rows: int, width: int) -> Weight:
        """Return a matrix with a row for each token, or this rank's rows, padded to the size of every rank's part."""
        if self.group is None:
            return self._read_weight(name, None)
        count = part_size(rows, self.group.size)
        first, last = (min(rows, count * number) for number in (self.group.rank, self.group.rank + 1))
        return self._read_weight(name, Cut(0, ((first, last),))).pad(count)

    def _rows(self, name: str, outputs: Parts) -> Cut | None:
        if self.group is None:
            return None
        return rows_of_rank(outputs, self._whole[name], self.group.rank, self.group.size)

    def _read(self, name: str, cut: Cut | None, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._source.tensor(name, dtype or self._dtype, cut=cut)
        self._progress(tensor.nbytes)
        return tensor.to(self._device)

    def _read_weight(self, name: str, cut: Cut | None) -> Weight:
        weight = self._source.weight(name, self._dtype, self._device, cut=cut)
        self._progress(weight.nbytes)
        return weight


def load_decoder(
    config: ModelConfig,
    source: TensorSource,
    device: torch.device,
    max_length: int,
    progress: Progress = lambda _bytes: None,
    group: Group | None = None,
) -> Decoder:
    """Read every tensor once, layer by layer, into the layout of its device; of several ranks, this rank's part."""
    whole = record(config)
    for name, expected in whole.shapes.items():  # check all shapes before memory is allocated
        if (shape := source.shape(name)) != expected:
            raise ModelError(
                f"tensor {name} has shape {shape}, but the config implies {expected}: "
                "config and weights belong to different models"
            )
    own = config if group is None else of_one_rank(config, group.size)
    decoder = build_decoder(own, LoadingTake(source, config.dtype, device, progress, group, whole.parts))
    decoder.prepare(max_length)
    return decoder
