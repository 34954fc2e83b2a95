"""The decoder: one config-driven stack for Llama, Mistral, Qwen2, Qwen3 and SmolLM, on a flat batch and paged KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from chairlift.models.config import ModelConfig
from chairlift.models.rope import rope_tables
from chairlift.ops.attention import paged_attention
from chairlift.ops.batch import Batch, Wanted
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.linear import Linear
from chairlift.ops.rotate import rotate_and_store


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; q, k and v are one matrix, gate and up another."""

    qkv: Linear  # with the norm before attention
    norms: tuple[torch.Tensor, torch.Tensor] | None  # of each head's query and key
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
        self.is_compiled = head.is_compiled
        self._turns = tuple(map(self._lay, rope_tables(config.rope, config.head_dim, max_length, self.device)))
        self._norms = [tuple(map(self._lay, layer.norms)) if layer.norms else None for layer in layers]

    def forward(self, tokens: torch.Tensor, batch: Batch, cache: KvCache, wanted: Wanted | None) -> torch.Tensor:
        """The last hidden states [tokens, hidden] of a flat batch, or of the `wanted` ones of its tokens alone."""
        x = self._lay(F.embedding(tokens, self.embedding))  # the residual stream: layers add to it in place
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            heads = self._store(index, layer.qkv(x), batch, cache)
            if wanted is not None and index == last:  # most tokens of a prompt only have to store their keys and values
                chosen: Any = wanted.host if self.is_compiled else wanted.on_device
                x, heads, batch = x[chosen], heads[chosen], wanted.batch
                if not x.shape[0]:
                    break
            seen = paged_attention(heads, self.config.heads, cache, index, batch, layer.window)
            layer.output(seen, add_to=x)
            layer.down(layer.gate_up(x), add_to=x)
        return torch.from_numpy(x) if self.is_compiled else x

    def _store(self, index: int, qkv: Any, batch: Batch, cache: KvCache) -> Any:
        """Queries, keys and values by heads, the former turned and the latter stored."""
        config = self.config
        heads = qkv.reshape(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        rotate_and_store(heads, cache, index, batch, self._turns, self._norms[index], config.norm_eps)
        return heads

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [rows, vocabulary] of some rows' hidden states, in the model's dtype; in `out`, if that is given."""
        return self.head(hidden) if out is None else self.head.into(hidden, out)

    def _lay(self, tensor: torch.Tensor) -> Any:
        """A tensor as the ops of this decoder take it."""
        return tensor.numpy() if self.is_compiled else tensor
