"""Rotary frequencies: the plain ones, and the ways families stretch them beyond their training length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from chairlift.core.errors import ModelError

SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base and how it is scaled."""

    theta: float = 10000.0
    scaling: str = "default"
    params: Mapping[str, Any] = field(default_factory=dict)
    factors: tuple[float, ...] = ()  # explicit divisors by frequency, as GGUF stores llama3's scaling

    @staticmethod
    def read(config: Mapping[str, Any]) -> RopeConfig:
        """From a config.json: rope_theta and rope_scaling, or the newer rope_parameters that holds both."""
        params = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = params.get("rope_type") or params.get("type") or "default"
        if kind not in SCALINGS:
            raise ModelError(f"rope scaling {kind!r} is not supported: Chairlift knows {', '.join(SCALINGS)}")
        theta = params.get("rope_theta") or config.get("rope_theta") or 10000.0
        params.setdefault("max_position_embeddings", config.get("max_position_embeddings", 2048))
        return RopeConfig(float(theta), kind, params, tuple(config.get("rope_freq_factors") or ()))


def rope_tables(rope: RopeConfig, dim: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, dim / 2] in float32."""
    inverse = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    attention = 1.0
    if rope.factors:
        inverse = inverse / torch.tensor(rope.factors)
    elif rope.scaling == "linear":
        inverse = inverse / rope.params["factor"]
    elif rope.scaling == "llama3":
        inverse = _llama3(inverse, rope.params)
    elif rope.scaling == "yarn":
        inverse, attention = _yarn(inverse, rope, dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    return (angles.cos() * attention).to(device), (angles.sin() * attention).to(device)


def _llama3(inverse: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended."""
    factor, low, high = params["factor"], params["low_freq_factor"], params["high_freq_factor"]
    trained = params["original_max_position_embeddings"]
    turns = trained * inverse / (2 * math.pi)  # full turns within the trained length
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: torch.Tensor = (1 - blend) * inverse / factor + blend * inverse
    return scaled


def _yarn(inverse: torch.Tensor, rope: RopeConfig, dim: int) -> tuple[torch.Tensor, float]:
    """YaRN: interpolate the slow frequencies along a ramp, and sharpen attention a little."""
    params = rope.params
    trained = params.get("original_max_position_embeddings") or params["max_position_embeddings"]
    factor = params.get("factor") or params["max_position_embeddings"] / trained

    def dimension(turns: float) -> float:
        """Where in the head the frequency makes this many turns within the trained length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(params.get("beta_fast") or 32), dimension(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    scaled = inverse / factor * ramp + inverse * (1 - ramp)
    return scaled, _yarn_attention(params, factor)


def _yarn_attention(params: Mapping[str, Any], factor: float) -> float:
    def sharpening(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return sharpening(params["mscale"]) / sharpening(params["mscale_all_dim"])
    return sharpening(1.0)
