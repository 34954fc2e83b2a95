"""Rotary frequencies, and the scalings that extend them beyond the trained length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from chairlift.core.values import Values

SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base and scaling of rotary frequencies."""

    theta: float = 10000.0
    scaling: str = "default"
    params: Mapping[str, float] = field(default_factory=dict)  # parameters of the scaling, defaults filled in
    factors: tuple[float, ...] = ()  # divisors by frequency, as GGUF stores the llama3 scaling
    long_factors: tuple[float, ...] = ()  # longrope's divisors for sequences beyond the trained length
    partial: float = 1.0  # share of each head that is rotated

    @staticmethod
    def read(config: Values, head_dim: int, params: Values | None = None, theta: float = 10000.0) -> RopeConfig:
        """Read a config.json: rope_theta and rope_scaling, or the newer rope_parameters, which has both.

        `params` replaces them in families with several ropes; `theta` is the family's default.
        """
        if params is None:
            params = config.part("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
        kind = params.text("rope_type", "") or params.text("type", "") or "default"
        if kind not in SCALINGS:
            raise params.wrong("rope_type" if params.has("rope_type") else "type", f"use {', '.join(SCALINGS)}")
        theta = (params if params.has("rope_theta") else config).number("rope_theta", theta, above=1.0)
        partial = (params if params.has("partial_rotary_factor") else config).number(
            "partial_rotary_factor", 1.0, most=1.0
        )
        rotated = int(head_dim * partial)
        if rotated % 4 and rotated < head_dim:
            raise config.wrong(
                "partial_rotary_factor", f"use a share of head_dim {head_dim} that is a multiple of 4 dimensions"
            )
        factors: tuple[float, ...] = ()
        longer: tuple[float, ...] = ()
        if kind == "longrope":
            factors, longer = (_factors(params, key, rotated // 2) for key in ("short_factor", "long_factor"))
        elif config.has("rope_freq_factors"):
            factors = _factors(config, "rope_freq_factors", rotated // 2)
        return RopeConfig(theta, kind, _READERS[kind](params, config), factors, longer, partial)

    def rotated(self, head_dim: int) -> int:
        """Return the number of rotated elements of a head."""
        return int(head_dim * self.partial)


def _factors(values: Values, key: str, count: int) -> tuple[float, ...]:
    factors = values.numbers(key)
    if len(factors) != count or min(factors) <= 0:
        raise values.wrong(key, f"use {count} positive numbers, one for each frequency")
    return tuple(factors)


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


def _longrope_params(params: Values, config: Values) -> dict[str, float]:
    length = config.number("max_position_embeddings", 2048)
    source = params if params.has("original_max_position_embeddings") else config
    trained = source.number("original_max_position_embeddings", length, above=1.0)
    factor = params.number("factor", length / trained)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return {"trained": trained, "attention": params.number("attention_factor", usual)}


_READERS = {
    "default": _no_params,
    "linear": _linear_params,
    "llama3": _llama3_params,
    "yarn": _yarn_params,
    "longrope": _longrope_params,
}


def rope_tables(rope: RopeConfig, dim: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [length, dim / 2] in float32; for the part of a head that is not rotated they are 1 and 0."""
    rest, dim = (dim - rope.rotated(dim)) // 2, rope.rotated(dim)
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    inverse, attention = 1.0 / powers, 1.0
    if rope.scaling == "longrope":
        factors = rope.long_factors if length > rope.params["trained"] else rope.factors
        inverse, attention = 1.0 / (torch.tensor(factors) * powers), rope.params["attention"]
    elif rope.factors:
        inverse = inverse / torch.tensor(rope.factors)
    elif rope.scaling == "linear":
        inverse = inverse / rope.params["factor"]
    elif rope.scaling == "llama3":
        inverse = _llama3(inverse, rope.params)
    elif rope.scaling == "yarn":
        inverse, attention = _yarn(inverse, rope, dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    cos, sin = angles.cos().mul_(attention), angles.sin().mul_(attention)
    return F.pad(cos, (0, rest), value=1.0).to(device), F.pad(sin, (0, rest)).to(device)


def _llama3(inverse: torch.Tensor, params: Mapping[str, float]) -> torch.Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend those in between."""
    rotations = params["trained"] * inverse / (2 * math.pi)  # within the trained length
    blend = ((rotations - params["low"]) / (params["high"] - params["low"])).clamp(0, 1)
    scaled: torch.Tensor = (1 - blend) * inverse / params["factor"] + blend * inverse
    return scaled


def _yarn(inverse: torch.Tensor, rope: RopeConfig, dim: int) -> tuple[torch.Tensor, float]:
    """Apply YaRN: interpolate slow frequencies along a ramp; the second result scales attention."""
    params = rope.params

    def dimension(rotations: float) -> float:
        """Return the dimension with this many rotations within the trained length."""
        return dim * math.log(params["trained"] / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(params["fast"]), dimension(params["slow"])
    if params["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    scaled = inverse / params["factor"] * ramp + inverse * (1 - ramp)
    return scaled, params["attention"]


def _yarn_attention(params: Values, factor: float) -> float:
    """Return YaRN's attention scale: from the config, or from the factor."""

    def sharpening(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if params.has("attention_factor"):
        return params.number("attention_factor")
    scale, all_dim = (params.number(key, 0.0, above=-1.0) for key in ("mscale", "mscale_all_dim"))
    return sharpening(scale) / sharpening(all_dim) if scale > 0 and all_dim > 0 else sharpening(1.0)
