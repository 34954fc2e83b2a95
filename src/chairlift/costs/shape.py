"""A model's shape in the numbers that decide its speed, from its config alone."""

from __future__ import annotations

import math

from chairlift.costs.hardware import Shape
from chairlift.models.families import outline, read_config
from chairlift.models.shapes import config_alone
from chairlift.ops.kv_quant import KV_DTYPES


def shape_of(model: str, bits: int = 16, kv_dtype: str = "auto") -> Shape:
    """Return the shape of a model by its name or its config, with weights of so many bits."""
    config = read_config(config_alone(model), "auto", "cuda", file=model)
    decoder, _ = outline(config)
    head = math.prod(decoder.head.shape)
    return Shape(
        layers=config.layers,
        layer_weights=decoder.layer_weights,
        head_weights=head,
        embedding_weights=0 if config.tied_embeddings else head,
        query_width=decoder.query_width,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        max_length=config.max_length,
        weight_bytes=bits / 8,
        kv_bytes=decoder.kv_bytes_per_token(KV_DTYPES.get(kv_dtype, config.dtype)),
    )
