"""Building a decoder: how a family takes its tensors, and the linear layers made of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

import torch

from chairlift.models.config import ModelConfig
from chairlift.ops.dense import Dense, concatenate
from chairlift.ops.group import Group
from chairlift.ops.linear import Linear
from chairlift.ops.norm import Norm
from chairlift.ops.vocabulary import part_size
from chairlift.ops.weight import Weight, join_weights

Parts = int | tuple[int, ...]  # outputs of a matrix, or of each projection in a matrix that stores several


class Split(Enum):
    """The dimension along which ranks split a matrix [outputs, inputs]."""

    OUTPUTS = 0
    INPUTS = 1


class Take(Protocol):
    """Returns a model's tensors by their Hugging Face names; a tensor of another shape is an error."""

    group: Group | None  # the ranks that share the model; None with one rank

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a whole tensor, in the model's dtype by default."""
        ...

    def weight(self, name: str, outputs: Parts, inputs: int, split: Split) -> Weight:
        """Return a matrix, or this rank's part of each projection stored in it; the sizes are this rank's."""
        ...

    def bias(self, name: str, outputs: Parts) -> torch.Tensor:
        """Return the bias of a column-parallel layer, or this rank's part of it; the sizes are this rank's."""
        ...

    def vocabulary(self, name: str, rows: int, width: int) -> Weight:
        """Return a matrix with a row for each token, or this rank's rows of it; the sizes are the whole matrix's."""
        ...


class RecordingTake:
    """Returns meta tensors and records their names and shapes: a model's outline without its weights."""

    def __init__(self, config: ModelConfig, ranks: int = 1) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parts: dict[str, Parts] = {}  # outputs of each matrix and bias that ranks split
        self.group: Group | None = None
        self._dtype, self._ranks = config.dtype, ranks
        self._format = None if config.format is None or config.format.expands else config.format
        self.nbytes = 0  # of all tensors in their formats

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Record a tensor."""
        self.shapes[name] = shape
        made = torch.empty(shape, dtype=dtype or self._dtype, device="meta")
        self.nbytes += made.nbytes
        return made

    def weight(self, name: str, outputs: Parts, inputs: int, split: Split) -> Weight:
        """Record a matrix."""
        self.parts[name] = outputs
        if self._format is None or not self._format.covers(name):
            return Dense(self.tensor(name, total(outputs), inputs))
        self.shapes[name] = total(outputs), inputs
        made = self._format.outline(total(outputs), inputs, self._dtype)
        self.nbytes += made.nbytes
        return made

    def bias(self, name: str, outputs: Parts) -> torch.Tensor:
        """Record a bias."""
        self.parts[name] = outputs
        return self.tensor(name, total(outputs))

    def vocabulary(self, name: str, rows: int, width: int) -> Weight:
        """Record a rank's part of a matrix with a row for each token."""
        return Dense(self.tensor(name, part_size(rows, self._ranks), width))


def total(outputs: Parts) -> int:
    """Return the outputs of all projections."""
    return outputs if isinstance(outputs, int) else sum(outputs)


def column_linear(
    take: Take, prefix: str, outputs: Mapping[str, Parts], inputs: int, *, bias: bool = False, **around: Any
) -> Linear:
    """Return several projections of one input as one column-parallel layer: each rank has a part of the outputs.

    `around` are further arguments of Linear, such as norm and gate.
    """
    weights = [take.weight(f"{prefix}{name}.weight", count, inputs, Split.OUTPUTS) for name, count in outputs.items()]
    biases = [take.bias(f"{prefix}{name}.bias", count) for name, count in outputs.items()] if bias else []
    return Linear(join_weights(weights), concatenate(biases) if bias else None, **around)


def row_linear(
    take: Take, name: str, outputs: int, inputs: int, *, bias: bool = False, output_norm: Norm | None = None
) -> Linear:
    """Return a row-parallel layer: each rank has a part of the inputs, and outputs are summed over ranks."""
    weight = take.weight(f"{name}.weight", outputs, inputs, Split.INPUTS)
    own = take.tensor(f"{name}.bias", outputs) if bias else None
    return Linear(weight, own, output_norm=output_norm, reduce=None if take.group is None else take.group.sum)


def embedding_and_head(config: ModelConfig, take: Take, norm: Norm) -> tuple[Weight, Linear]:
    """Return the embedding and the head, which includes the norm before it; each rank has a part of the vocabulary."""
    size, hidden = config.vocab_size, config.hidden_size
    embedding = take.vocabulary("model.embed_tokens.weight", size, hidden)
    output = embedding if config.tied_embeddings else take.vocabulary("lm_head.weight", size, hidden)
    return embedding, Linear(output, norm=norm)
