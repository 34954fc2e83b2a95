"""ModelConfig: what the one decoder needs to know of a model, read from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from chairlift.core.errors import ModelError
from chairlift.core.values import Values, show
from chairlift.models.rope import RopeConfig

MAX_LAYERS = 10_000
MAX_HEADS = 1 << 16
MAX_LENGTH = 1 << 24
"""Beyond any model there is, and small enough that what is made for each layer or head takes megabytes at most."""


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
    windows: Callable[[Values, int], tuple[int, ...]] = lambda _config, layers: (0,) * layers


def _same_window(config: Values, layers: int) -> tuple[int, ...]:
    return (config.count("sliding_window", 0, least=0, most=MAX_LENGTH),) * layers


def _window_by_layer(config: Values, layers: int) -> tuple[int, ...]:
    """Qwen: only with use_sliding_window, and only in the layers from max_window_layers on."""
    is_used = config.flag("use_sliding_window")
    window = config.count("sliding_window", 0, least=0, most=MAX_LENGTH)
    first = config.count("max_window_layers", layers, least=0, most=MAX_LAYERS)
    kinds = config.texts("layer_types")
    if kinds and len(kinds) != layers:
        raise config.wrong("layer_types", f"use one entry for each of the {layers} layers")
    if not is_used:
        return (0,) * layers
    slides = [kind == "sliding_attention" for kind in kinds] or [layer >= first for layer in range(layers)]
    return tuple(window if each else 0 for each in slides)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),  # Llama 2 and 3, SmolLM, SmolLM2, TinyLlama, ...
    "MistralForCausalLM": Family(windows=_same_window),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=_window_by_layer),
    "Qwen3ForCausalLM": Family(qk_norm=True, windows=_window_by_layer),
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(
    config: Mapping[str, Any], dtype: str = "auto", device: str = "cpu", file: object = "config.json"
) -> ModelConfig:
    """The decoder's shape from a config.json; an unknown architecture is refused with the list of those we have.

    `file` is where the config comes from, for errors.
    """
    values = Values(file, config)
    architecture = (values.texts("architectures") or ["(none named)"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(
            f"{file}: architecture {show(architecture)} is not supported: Chairlift runs {', '.join(sorted(FAMILIES))}"
        )
    layers, vocab_size = values.count("num_hidden_layers", most=MAX_LAYERS), values.count("vocab_size")
    heads, kv_heads, head_dim = _heads(values)
    has_bias = values.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=values.count("hidden_size"),
        intermediate_size=values.count("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=values.number("rms_norm_eps", 1e-6, most=1.0),
        rope=RopeConfig.read(values, head_dim),
        max_length=values.count("max_position_embeddings", 2048, most=MAX_LENGTH),
        tied_embeddings=values.flag("tie_word_embeddings"),
        qkv_bias=has_bias or family.qkv_bias,
        output_bias=has_bias,
        mlp_bias=values.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        windows=family.windows(values, layers),
        dtype=_choose_dtype(values, dtype, device),
        eos_ids=_eos_ids(values, vocab_size),
    )


def _heads(values: Values) -> tuple[int, int, int]:
    """How many heads of queries and of keys, and their size."""
    heads = values.count("num_attention_heads", most=MAX_HEADS)
    kv_heads = values.count("num_key_value_heads", heads, most=MAX_HEADS)
    if heads % kv_heads:
        raise values.wrong("num_key_value_heads", f"use a divisor of num_attention_heads, which is {heads}")
    hidden = values.count("hidden_size")
    if not values.has("head_dim") and hidden % heads:
        raise values.wrong("hidden_size", f"use a multiple of num_attention_heads, which is {heads}, or add head_dim")
    head_dim = values.count("head_dim", hidden // heads, most=MAX_HEADS)
    if head_dim % 2:
        raise values.wrong("head_dim", "use an even number: rotary embeddings turn pairs of dimensions")
    return heads, kv_heads, head_dim


def _choose_dtype(values: Values, wanted: str, device: str) -> torch.dtype:
    own = (values.text("torch_dtype", "") or values.text("dtype", "bfloat16")).removeprefix("torch.")
    if wanted != "auto":
        if wanted not in DTYPES:
            raise ModelError(f"dtype {wanted!r} is unknown: use auto, {', '.join(DTYPES)}")
        return DTYPES[wanted]
    if device == "cpu":
        return torch.float32  # what our CPU kernels are written for; half precision is slower there
    return torch.bfloat16 if own == "float32" else DTYPES.get(own, torch.bfloat16)


def _eos_ids(values: Values, vocab_size: int) -> frozenset[int]:
    """Every id that ends an answer; the generation config may know more than the model's."""
    generation = values.part("generation_config")
    return frozenset(id for each in (values, generation) for id in each.ids("eos_token_id", vocab_size))
