"""The decoder: one config-driven stack for Llama, Mistral, Qwen2, Qwen3 and SmolLM, on a flat batch and paged KV."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from chairlift.models.config import ModelConfig
from chairlift.models.rope import rope_tables
from chairlift.ops.attention import paged_attention
from chairlift.ops.batch import Batch
from chairlift.ops.kv_cache import KvCache, write_kv
from chairlift.ops.linear import Linear
from chairlift.ops.norm import rms_norm
from chairlift.ops.rope import rope_


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; q, k and v are one matrix, gate and up another."""

    qkv: Linear  # with the norm before attention
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    gate_up: Linear  # with the norm before the MLP
    down: Linear
    window: int


class Decoder:
    """Tokens in, logits out; keys and values go to the cache on the way."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: list[Layer],
        head: Linear,
        max_length: int,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.head = head
        self.device = embedding.device
        self.cos, self.sin = rope_tables(config.rope, config.head_dim, max_length, self.device)

    def forward(self, tokens: torch.Tensor, batch: Batch, cache: KvCache) -> torch.Tensor:
        """The last hidden states [tokens, hidden] of a flat batch."""
        x = F.embedding(tokens, self.embedding)  # the residual stream: layers add to it in place
        for index, layer in enumerate(self.layers):
            self._attend(x, index, layer, batch, cache)
            layer.down(layer.gate_up(x), add_to=x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [rows, vocabulary] of some rows' hidden states."""
        return self.head(hidden).float()

    def _attend(self, x: torch.Tensor, index: int, layer: Layer, batch: Batch, cache: KvCache) -> None:
        config = self.config
        qkv = layer.qkv(x).view(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        turned = config.heads + config.kv_heads  # values are not rotated
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qkv[:, : config.heads], qkv[:, config.heads : turned]
            q.copy_(rms_norm(q, layer.q_norm, config.norm_eps))
            k.copy_(rms_norm(k, layer.k_norm, config.norm_eps))
        rope_(qkv, turned, batch, self.cos, self.sin)
        write_kv(cache, index, qkv, batch)
        layer.output(paged_attention(qkv, config.heads, cache, index, batch, layer.window), add_to=x)
