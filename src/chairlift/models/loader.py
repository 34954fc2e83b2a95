"""From a checkpoint, or from nothing, to a Decoder on its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from chairlift.core.errors import ModelError
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder, Layer
from chairlift.ops.linear import Linear, Norm

Progress = Callable[[int], None]  # told how many bytes more are in place


class TensorSource(Protocol):
    """Hands out a model's tensors by their Hugging Face names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it; a ModelError if there is no such tensor."""
        ...

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, in `dtype` if given."""
        ...


class RandomTensors:
    """Random weights of the right shapes: speed does not depend on what a model has learned."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        self._shapes = tensor_shapes(config)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that the config asks for."""
        return self._shapes[name]

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Norms are 1, biases and matrices small and normal, as a fresh model's are."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self._device)
        return torch.empty(shape, dtype=dtype, device=self._device).normal_(0, 0.02, generator=self._generator)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config has."""
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.heads * dim, config.kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.layers):
        prefix = f"model.layers.{i}."
        matrices = {
            "self_attn.q_proj": (q, hidden, config.qkv_bias),
            "self_attn.k_proj": (kv, hidden, config.qkv_bias),
            "self_attn.v_proj": (kv, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, q, config.output_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        for name, (rows, columns, has_bias) in matrices.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                shapes[f"{prefix}self_attn.{name}.weight"] = (dim,)
    return shapes


def load_decoder(
    config: ModelConfig,
    source: TensorSource,
    device: torch.device,
    max_length: int,
    progress: Progress = lambda _bytes: None,
) -> Decoder:
    """Read every tensor once, layer by layer, into the layout its device likes."""
    shapes = tensor_shapes(config)
    for name, expected in shapes.items():  # all of them before any takes memory
        if (shape := source.shape(name)) != expected:
            raise ModelError(
                f"tensor {name} has shape {shape}, but the config asks for {expected}: "
                "config and weights belong to different models"
            )

    def take(name: str) -> torch.Tensor:
        tensor = source.tensor(name, config.dtype)
        progress(tensor.numel() * tensor.element_size())
        return tensor.to(device)

    def norm(name: str) -> Norm:
        return Norm(take(name), config.norm_eps)

    def matrix(prefix: str, *names: str, before: str | None = None, gated: bool = False) -> Linear:
        weight = torch.cat([take(f"{prefix}{name}.weight") for name in names])
        has_bias = f"{prefix}{names[0]}.bias" in shapes
        bias = torch.cat([take(f"{prefix}{name}.bias") for name in names]) if has_bias else None
        return Linear(weight, bias, norm=norm(before) if before else None, gated=gated)

    layers = []
    for i in range(config.layers):
        prefix = f"model.layers.{i}."
        layers.append(
            Layer(
                qkv=matrix(
                    f"{prefix}self_attn.", "q_proj", "k_proj", "v_proj", before=f"{prefix}input_layernorm.weight"
                ),
                norms=(take(f"{prefix}self_attn.q_norm.weight"), take(f"{prefix}self_attn.k_norm.weight"))
                if config.qk_norm
                else None,
                output=matrix(f"{prefix}self_attn.", "o_proj"),
                gate_up=matrix(
                    f"{prefix}mlp.",
                    "gate_proj",
                    "up_proj",
                    before=f"{prefix}post_attention_layernorm.weight",
                    gated=True,
                ),
                down=matrix(f"{prefix}mlp.", "down_proj"),
                window=config.windows[i],
            )
        )
    embedding = take("model.embed_tokens.weight")
    output = embedding if config.tied_embeddings else take("lm_head.weight")
    return Decoder(config, embedding, layers, Linear(output, norm=norm("model.norm.weight")), max_length)
