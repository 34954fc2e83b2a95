"""Scoring: how the products of a query and its keys become attention weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scoring:
    """softmax(cap(scale * q.k)), over the keys and, where there are sinks, one further score that has no value."""

    scale: float
    softcap: float = 0.0  # scores are softcap * tanh(score / softcap); 0: as they are
    sinks: torch.Tensor | None = None  # [heads], float32

    @staticmethod
    def usual(dim: int) -> Scoring:
        """Scores divided by the square root of the head size."""
        return Scoring(1.0 / math.sqrt(dim))
