"""Load a Decoder onto its device, from a checkpoint or with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from chairlift.core.errors import ModelError
from chairlift.models.building import Parts, Split, total
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder
from chairlift.models.families import build_decoder, outline
from chairlift.ops.dense import Dense
from chairlift.ops.linear import Reduce
from chairlift.ops.weight import Weight

Progress = Callable[[int], None]  # called with the bytes of each loaded tensor


class TensorSource(Protocol):
    """Returns a model's tensors by their Hugging Face names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it; raise ModelError if it does not exist."""
        ...

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read a tensor, in `dtype` if given."""
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

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return ones for norms, and small normal numbers for biases and matrices, as in an untrained model."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self._device)
        return torch.empty(shape, dtype=dtype, device=self._device).normal_(0, 0.02, generator=self._generator)


class LoadingTake:
    """Reads tensors from a source and copies them to a device."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device, progress: Progress) -> None:
        self.reduce: Reduce | None = None
        self._source, self._dtype, self._device, self._progress = source, dtype, device, progress

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a whole tensor."""
        tensor = self._source.tensor(name, dtype or self._dtype)
        self._progress(tensor.nbytes)
        return tensor.to(self._device)

    def weight(self, name: str, outputs: Parts, inputs: int, split: Split) -> Weight:
        """Return a matrix."""
        return Dense(self.tensor(name, total(outputs), inputs))


def load_decoder(
    config: ModelConfig,
    source: TensorSource,
    device: torch.device,
    max_length: int,
    progress: Progress = lambda _bytes: None,
) -> Decoder:
    """Read every tensor once, layer by layer, into the layout of its device."""
    for name, expected in outline(config)[1].items():  # check all shapes before memory is allocated
        if (shape := source.shape(name)) != expected:
            raise ModelError(
                f"tensor {name} has shape {shape}, but the config implies {expected}: "
                "config and weights belong to different models"
            )
    decoder = build_decoder(config, LoadingTake(source, config.dtype, device, progress))
    decoder.prepare(max_length)
    return decoder
