"""The blocks of a decoder: grouped-query attention and a gated MLP, each with its residual."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from chairlift.models.rope import RopeConfig
from chairlift.ops.attention import paged_attention
from chairlift.ops.batch import Batch, SampledTokens
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.linear import Linear
from chairlift.ops.norm import Norm
from chairlift.ops.rotate import rotate_and_store
from chairlift.ops.scoring import Scoring


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The shape of an attention layer's KV per token, and its window."""

    kv_heads: int
    head_dim: int
    window: int = 0  # older tokens' keys and values are not read; 0: no limit


@dataclass(slots=True)
class Attention:
    """Grouped-query attention: one product for queries, keys and values, rotary embedding, KV cache, output."""

    qkv: Linear  # including the norm before it
    output: Linear  # adds to the residual
    heads: int
    spec: CacheSpec
    rope: RopeConfig
    scoring: Scoring
    norms: tuple[Norm, Norm] | None = None  # of the query and key of each head
    # Set by Decoder.prepare, for the longest sequence and the decoder's array type:
    tables: tuple[Any, Any] = field(init=False)  # cosines and sines of `rope` by position
    norm_weights: tuple[Any, Any] | None = field(init=False)

    def store(self, x: Any, slot: int, batch: Batch, cache: KvCache) -> Any:
        """Return rotated queries, keys and values [tokens, heads, dim], after writing keys and values to the cache."""
        heads = self.qkv(x).reshape(-1, self.heads + 2 * self.spec.kv_heads, self.spec.head_dim)
        eps = self.norms[0].eps if self.norms else 0.0
        rotate_and_store(heads, cache, slot, batch, self.tables, self.norm_weights, eps)
        return heads

    def attend(self, qkv: Any, x: Any, slot: int, batch: Batch, cache: KvCache) -> None:
        """Add the attention output of the queries over the cache to x."""
        seen = paged_attention(qkv, self.heads, cache, slot, batch, self.spec.window, self.scoring)
        self.output(seen, add_to=x)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """The MLP (gate(x @ G) * (x @ U)) @ D."""

    gate_up: Linear  # including the norm before it
    down: Linear  # adds to the residual

    def __call__(self, x: Any) -> None:
        """Add the output to x."""
        self.down(self.gate_up(x), add_to=x)


@dataclass(frozen=True, slots=True)
class Block:
    """One layer of a decoder."""

    attention: Attention
    mlp: GatedMlp

    def __call__(self, x: Any, slot: int, batch: Batch, cache: KvCache, wanted: SampledTokens | None) -> Any:
        """Return the residual after the layer, of all tokens or of the `wanted` ones alone; its KV is in `slot`."""
        qkv = self.attention.store(x, slot, batch, cache)
        if wanted is not None:  # the other tokens only have to store their keys and values
            chosen: Any = wanted.on_device if isinstance(x, torch.Tensor) else wanted.host
            x, qkv, batch = x[chosen], qkv[chosen], wanted.batch
            if not x.shape[0]:
                return x
        self.attention.attend(qkv, x, slot, batch, cache)
        self.mlp(x)
        return x

    @property
    def linears(self) -> dict[str, Linear]:
        """The linear layers by their names in reports."""
        return {
            "queries, keys, values": self.attention.qkv,
            "attention's output": self.attention.output,
            "gate and up": self.mlp.gate_up,
            "down": self.mlp.down,
        }
