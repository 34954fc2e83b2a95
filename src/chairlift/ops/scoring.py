"""Scoring: scale, softcap and sinks of the attention scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scoring:
    """softmax(cap(scale * q.k)) over the keys; a sink is one more score, without a value."""

    scale: float
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0 is off
    sinks: torch.Tensor | None = None  # [heads], float32

    @staticmethod
    def default(dim: int) -> Scoring:
        """Return the usual scoring: scores divided by the square root of the head size."""
        return Scoring(1.0 / math.sqrt(dim))
