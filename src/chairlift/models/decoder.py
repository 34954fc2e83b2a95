"""The decoder: one config-driven stack for Llama, Mistral, Qwen2, Qwen3 and SmolLM, on a flat batch and paged KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from chairlift.models.config import ModelConfig
from chairlift.models.rope import rope_tables
from chairlift.ops.attention import paged_attention
from chairlift.ops.batch import Batch, send
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

    def forward(self, tokens: torch.Tensor, batch: Batch, cache: KvCache, wanted: np.ndarray | None) -> torch.Tensor:
        """The last hidden states [tokens, hidden] of a flat batch, or of the `wanted` ones of its tokens alone."""
        x = self._lay(self.embed(tokens))  # the residual stream: layers add to it in place
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(x)
            if wanted is not None and index == last:
                return self.finish(qkv, x, batch, cache, wanted)
            self.close(index, self.attend(index, qkv, batch, cache), x)
        return torch.from_numpy(x) if self.is_compiled else x

    def finish(self, qkv: Any, x: Any, batch: Batch, cache: KvCache, wanted: np.ndarray) -> torch.Tensor:
        """The last layer, of which most tokens of a prompt only have to store their keys and values."""
        index = len(self.layers) - 1
        heads = self._store(index, qkv, batch, cache)
        chosen: Any = wanted if self.is_compiled else send(self.device, wanted)[0].long()
        x = x[chosen]
        if wanted.size:
            self.close(index, self._see(index, heads[chosen], batch.only(wanted), cache), x)
        return torch.from_numpy(x) if self.is_compiled else x

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """What tokens begin as [tokens, hidden]."""
        return F.embedding(tokens, self.embedding)

    def attend(self, index: int, qkv: Any, batch: Batch, cache: KvCache, out: Any = None) -> Any:
        """What a layer's queries see, from their projection; written to `out` if that is given."""
        return self._see(index, self._store(index, qkv, batch, cache), batch, cache, out)

    def _store(self, index: int, qkv: Any, batch: Batch, cache: KvCache) -> Any:
        config = self.config
        heads = qkv.reshape(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        rotate_and_store(heads, cache, index, batch, self._turns, self._norms[index], config.norm_eps)
        return heads

    def _see(self, index: int, heads: Any, batch: Batch, cache: KvCache, out: Any = None) -> Any:
        return paged_attention(heads, self.config.heads, cache, index, batch, self.layers[index].window, out)

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
