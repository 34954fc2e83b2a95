"""A model's shape in the numbers that decide its speed, from its config alone."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.costs.hardware import Shape
from chairlift.models.config import ModelConfig
from chairlift.models.division import divides, of_one_rank
from chairlift.models.families import outline, read_config
from chairlift.models.shapes import config_alone
from chairlift.ops.kv_quant import KV_DTYPES

_FORMATS = {16: "none", 8: "fp8", 4: "int4"}  # the setting `quantization` by the bits of a weight


def shape_of(model: str, bits: int = 16, kv_dtype: str = "auto") -> Shape:
    """Return the shape of a model by its name or its config, with the layers' weights in 16 bits, fp8 or int4."""
    config = _config(model, bits)
    decoder, _ = outline(config)
    return Shape(
        layers=config.layers,
        layer_weights=decoder.layer_weights,
        read_bytes=decoder.read_bytes,
        embedding_bytes=0 if config.tied_embeddings else decoder.embedding.nbytes,
        query_width=decoder.query_width,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        max_length=config.max_length,
        kv_bytes=decoder.kv_bytes_per_token(KV_DTYPES.get(kv_dtype, config.dtype)),
    )


def ranks_of(model: str, counts: Sequence[int]) -> list[int]:
    """Return the numbers of ranks in `counts` that a model can be divided among; a SettingsError if there is none."""
    config = _config(model)
    found = [count for count in counts if divides(config, count)]
    if not found:
        of_one_rank(config, counts[0])  # raises
    return found


def _config(model: str, bits: int = 16) -> ModelConfig:
    return read_config(config_alone(model), "auto", "cuda", file=model, quantization=_FORMATS[bits])
