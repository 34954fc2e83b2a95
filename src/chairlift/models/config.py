"""ModelConfig: the values that every decoder has, read from a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chairlift.core.errors import ModelError
from chairlift.core.values import Values
from chairlift.models.bounds import MAX_HEADS, MAX_LAYERS, MAX_LENGTH
from chairlift.models.formats.format import Format


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The values that every decoder has; a family's file reads its own from `values`."""

    architecture: str
    values: Values
    vocab_size: int
    hidden_size: int
    inner_size: int  # of the MLP
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_length: int
    tied_embeddings: bool
    dtype: torch.dtype
    eos_ids: frozenset[int]
    format: Format | None = None  # of quantized matrices; None: all are dense


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_common(architecture: str, values: Values, dtype: str, device: str, ties: bool) -> ModelConfig:
    """Read the common values; `ties` is the family's default of tie_word_embeddings."""
    vocab_size = values.count("vocab_size")
    heads, kv_heads, head_dim = _heads(values)
    return ModelConfig(
        architecture=architecture,
        values=values,
        vocab_size=vocab_size,
        hidden_size=values.count("hidden_size"),
        inner_size=values.count("intermediate_size"),
        layers=values.count("num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=values.number("rms_norm_eps", 1e-6, most=1.0),
        max_length=values.count("max_position_embeddings", 2048, most=MAX_LENGTH),
        tied_embeddings=values.flag("tie_word_embeddings", ties),
        dtype=_choose_dtype(values, dtype, device),
        eos_ids=_eos_ids(values, vocab_size),
    )


def _heads(values: Values) -> tuple[int, int, int]:
    """Read the numbers of query and KV heads, and the head size."""
    heads = values.count("num_attention_heads", most=MAX_HEADS)
    kv_heads = values.count("num_key_value_heads", heads, most=MAX_HEADS)
    if heads % kv_heads:
        raise values.wrong("num_key_value_heads", f"use a divisor of num_attention_heads, which is {heads}")
    hidden = values.count("hidden_size")
    if not values.has("head_dim") and hidden % heads:
        raise values.wrong("hidden_size", f"use a multiple of num_attention_heads, which is {heads}, or add head_dim")
    head_dim = values.count("head_dim", hidden // heads, most=MAX_HEADS)
    if head_dim % 2:
        raise values.wrong("head_dim", "use an even number: rotary embeddings rotate pairs of dimensions")
    return heads, kv_heads, head_dim


def _choose_dtype(values: Values, wanted: str, device: str) -> torch.dtype:
    own = (values.text("torch_dtype", "") or values.text("dtype", "bfloat16")).removeprefix("torch.")
    if wanted != "auto":
        if wanted not in DTYPES:
            raise ModelError(f"dtype {wanted!r} is unknown: use auto, {', '.join(DTYPES)}")
        return DTYPES[wanted]
    if device == "cpu":
        return torch.float32  # the dtype of our CPU kernels; half precision is slower there
    return torch.bfloat16 if own == "float32" else DTYPES.get(own, torch.bfloat16)


def _eos_ids(values: Values, vocab_size: int) -> frozenset[int]:
    """Return all end-of-sequence ids, of config.json and of generation_config.json."""
    generation = values.part("generation_config")
    return frozenset(id for each in (values, generation) for id in each.ids("eos_token_id", vocab_size))
