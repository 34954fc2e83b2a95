"""ModelConfig: what the one decoder needs to know of a model, read from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from chairlift.core.errors import ModelError
from chairlift.models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_length: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # by layer; 0 sees everything
    dtype: torch.dtype
    eos_ids: frozenset[int]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes in all layers, at the config's own dtype."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture departs from Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False
    windows: Callable[[Mapping[str, Any], int], tuple[int, ...]] = lambda _config, layers: (0,) * layers


def _same_window(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    return (config.get("sliding_window") or 0,) * layers


def _window_by_layer(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Qwen: only with use_sliding_window, and only in the layers from max_window_layers on."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else 0
    if not window:
        return (0,) * layers
    kinds = config.get("layer_types") or [
        "sliding_attention" if i >= config.get("max_window_layers", layers) else "full_attention" for i in range(layers)
    ]
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),  # Llama 2 and 3, SmolLM, SmolLM2, TinyLlama, ...
    "MistralForCausalLM": Family(windows=_same_window),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=_window_by_layer),
    "Qwen3ForCausalLM": Family(qk_norm=True, windows=_window_by_layer),
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(config: Mapping[str, Any], dtype: str = "auto", device: str = "cpu") -> ModelConfig:
    """The decoder's shape from a config.json; an unknown architecture is refused with the list of those we have."""
    architecture = (config.get("architectures") or ["(none named)"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(f"architecture {architecture} is not supported: Chairlift runs {', '.join(sorted(FAMILIES))}")
    try:
        heads, layers, hidden = (
            int(config[key]) for key in ("num_attention_heads", "num_hidden_layers", "hidden_size")
        )
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            layers=layers,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.read(config),
            max_length=int(config.get("max_position_embeddings", 2048)),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", False)) or family.qkv_bias,
            output_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            windows=family.windows(config, layers),
            dtype=_choose_dtype(config, dtype, device),
            eos_ids=_eos_ids(config),
        )
    except KeyError as missing:
        raise ModelError(f"the model's config has no {missing}: is this a {architecture} config.json?") from None


def _choose_dtype(config: Mapping[str, Any], wanted: str, device: str) -> torch.dtype:
    if wanted != "auto":
        if wanted not in DTYPES:
            raise ModelError(f"dtype {wanted!r} is unknown: use auto, {', '.join(DTYPES)}")
        return DTYPES[wanted]
    if device == "cpu":
        return torch.float32  # what our CPU kernels are written for; half precision is slower there
    own = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    return torch.bfloat16 if own == "float32" else DTYPES.get(own, torch.bfloat16)


def _eos_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """Every id that ends an answer; the generation config may know more than the model's."""
    found: set[int] = set()
    for source in (config, config.get("generation_config") or {}):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)
