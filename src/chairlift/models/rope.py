"""Rotary frequencies: the plain ones, and the ways families stretch them beyond their training length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from chairlift.core.values import Values

SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base and how it is scaled."""

    theta: float = 10000.0
    scaling: str = "default"
    params: Mapping[str, float] = field(default_factory=dict)  # what the scaling needs, every value given
    factors: tuple[float, ...] = ()  # explicit divisors by frequency, as GGUF stores llama3's scaling

    @staticmethod
    def read(config: Values, head_dim: int) -> RopeConfig:
        """From a config.json: rope_theta and rope_scaling, or the newer rope_parameters that holds both."""
        params = config.part("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
        kind = params.text("rope_type", "") or params.text("type", "") or "default"
        if kind not in SCALINGS:
            raise params.wrong("rope_type" if params.has("rope_type") else "type", f"use {', '.join(SCALINGS)}")
        theta = (params if params.has("rope_theta") else config).number("rope_theta", 10000.0, above=1.0)
        factors = config.numbers("rope_freq_factors")
        if factors and (len(factors) != head_dim // 2 or min(factors) <= 0):
            raise config.wrong("rope_freq_factors", f"use {head_dim // 2} positive numbers, one for each frequency")
        return RopeConfig(theta, kind, _READERS[kind](params, config), tuple(factors))


def _no_params(_params: Values, _config: Values) -> dict[str, float]:
    return {}


def _linear_params(params: Values, _config: Values) -> dict[str, float]:
    return {"factor": params.number("factor")}


def _llama3_params(params: Values, _config: Values) -> dict[str, float]:
    low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
    if low >= high:
        raise params.wrong("high_freq_factor", f"use a number above low_freq_factor, which is {low:g}")
    trained = params.number("original_max_position_embeddings")
    return {"factor": params.number("factor"), "low": low, "high": high, "trained": trained}


def _yarn_params(params: Values, config: Values) -> dict[str, float]:
    length = config.number("max_position_embeddings", 2048)
    trained = params.number("original_max_position_embeddings", params.number("max_position_embeddings", length))
    factor = params.number("factor", length / trained)
    return {
        "factor": factor,
        "trained": trained,
        "fast": params.number("beta_fast", 32),
        "slow": params.number("beta_slow", 1),
        "truncate": params.flag("truncate", True),
        "attention": _yarn_attention(params, factor),
    }


_READERS = {"default": _no_params, "linear": _linear_params, "llama3": _llama3_params, "yarn": _yarn_params}


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


def _llama3(inverse: torch.Tensor, params: Mapping[str, float]) -> torch.Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended."""
    turns = params["trained"] * inverse / (2 * math.pi)  # full turns within the trained length
    blend = ((turns - params["low"]) / (params["high"] - params["low"])).clamp(0, 1)
    scaled: torch.Tensor = (1 - blend) * inverse / params["factor"] + blend * inverse
    return scaled


def _yarn(inverse: torch.Tensor, rope: RopeConfig, dim: int) -> tuple[torch.Tensor, float]:
    """YaRN: interpolate the slow frequencies along a ramp, and sharpen attention a little."""
    params = rope.params

    def dimension(turns: float) -> float:
        """Where in the head the frequency makes this many turns within the trained length."""
        return dim * math.log(params["trained"] / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(params["fast"]), dimension(params["slow"])
    if params["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    scaled = inverse / params["factor"] * ramp + inverse * (1 - ramp)
    return scaled, params["attention"]


def _yarn_attention(params: Values, factor: float) -> float:
    """How much attention is sharpened: as the config says, or by the factor."""

    def sharpening(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if params.has("attention_factor"):
        return params.number("attention_factor")
    scale, all_dim = (params.number(key, 0.0, above=-1.0) for key in ("mscale", "mscale_all_dim"))
    return sharpening(scale) / sharpening(all_dim) if scale > 0 and all_dim > 0 else sharpening(1.0)
