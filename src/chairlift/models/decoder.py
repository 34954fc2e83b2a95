"""The decoder: one config-driven stack for Llama, Mistral, Qwen2, Qwen3 and SmolLM, on a flat batch and paged KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from chairlift.models.config import ModelConfig
from chairlift.models.rope import rope_tables
from chairlift.ops.attention import paged_attention
from chairlift.ops.batch import Batch
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

    def forward(self, tokens: torch.Tensor, batch: Batch, cache: KvCache, wanted: torch.Tensor | None) -> torch.Tensor:
        """The last hidden states [tokens, hidden] of a flat batch, or of the `wanted` ones of its tokens alone."""
        x = self._lay(self.embed(tokens))  # the residual stream: layers add to it in place
        for index, layer in enumerate(self.layers):
            seen = self.attend(index, layer.qkv(x), batch, cache)
            if wanted is not None and index == len(self.layers) - 1:
                # Of most prompt tokens only the keys and values matter, and the last layer has just stored them.
                chosen = self._lay(wanted)
                x, seen = x[chosen], seen[chosen]
            self.close(index, seen, x)
        return torch.from_numpy(x) if self.is_compiled else x

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """What tokens begin as [tokens, hidden]."""
        return F.embedding(tokens, self.embedding)

    def attend(self, index: int, qkv: Any, batch: Batch, cache: KvCache, out: Any = None) -> Any:
        """What a layer's queries see, from their projection; written to `out` if that is given."""
        config, window = self.config, self.layers[index].window
        qkv = qkv.reshape(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        rotate_and_store(qkv, cache, index, batch, self._turns, self._norms[index], config.norm_eps)
        return paged_attention(qkv, config.heads, cache, index, batch, window, out)

    def close(self, index: int, seen: Any, x: Any) -> None:
        """The rest of a layer, added to the residual stream."""
        layer = self.layers[index]
        layer.output(seen, add_to=x)
        layer.down(layer.gate_up(x), add_to=x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] of some rows' hidden states, in the model's dtype."""
        return self.head(hidden)

    def _lay(self, tensor: torch.Tensor) -> Any:
        """A tensor as the ops of this decoder take it."""
        return tensor.numpy() if self.is_compiled else tensor
