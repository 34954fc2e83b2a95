"""The blocks that decoders are built of: grouped-query attention and a gated MLP, each with its residual."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from chairlift.models.rope import RopeConfig
from chairlift.ops.attention import paged_attention
from chairlift.ops.batch import Batch, Wanted
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.linear import Linear
from chairlift.ops.norm import Norm
from chairlift.ops.rotate import rotate_and_store
from chairlift.ops.scoring import Scoring


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What an attention layer keeps of each token."""

    kv_heads: int
    head_dim: int
    window: int = 0  # keys and values of tokens further back are never read again; 0: all are


@dataclass(slots=True)
class Attention:
    """Grouped-query attention: queries, keys and values in one product, rotated, the latter kept in the cache."""

    qkv: Linear  # with the norm before it
    output: Linear  # adds to the residual stream
    heads: int
    spec: CacheSpec
    rope: RopeConfig
    scoring: Scoring
    norms: tuple[Norm, Norm] | None = None  # of each head's query and key
    # Made by the decoder, which knows the longest sequence and whether its ops take arrays:
    tables: tuple[Any, Any] = field(init=False)  # of `rope`: cosines and sines by position
    norm_weights: tuple[Any, Any] | None = field(init=False)

    def store(self, x: Any, layer: int, batch: Batch, cache: KvCache) -> Any:
        """Return queries, keys and values [tokens, heads, dim], rotated; keys and values go to the cache."""
        heads = self.qkv(x).reshape(-1, self.heads + 2 * self.spec.kv_heads, self.spec.head_dim)
        eps = self.norms[0].eps if self.norms else 0.0
        rotate_and_store(heads, cache, layer, batch, self.tables, self.norm_weights, eps)
        return heads

    def attend(self, qkv: Any, x: Any, layer: int, batch: Batch, cache: KvCache) -> None:
        """Add to x what its queries find in the cache."""
        seen = paged_attention(qkv, self.heads, cache, layer, batch, self.spec.window, self.scoring)
        self.output(seen, add_to=x)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """gate(x @ G) * (x @ U), projected back."""

    gate_up: Linear  # with the norm before it
    down: Linear  # adds to the residual stream

    def __call__(self, x: Any) -> None:
        """Add the output to x."""
        self.down(self.gate_up(x), add_to=x)


@dataclass(frozen=True, slots=True)
class Block:
    """One layer of a decoder."""

    attention: Attention
    mlp: GatedMlp

    def __call__(self, x: Any, layer: int, batch: Batch, cache: KvCache, wanted: Wanted | None) -> Any:
        """Return the residual stream behind the layer, of all tokens or of the `wanted` ones alone."""
        qkv = self.attention.store(x, layer, batch, cache)
        if wanted is not None:  # the other tokens only have to store their keys and values
            chosen: Any = wanted.on_device if isinstance(x, torch.Tensor) else wanted.host
            x, qkv, batch = x[chosen], qkv[chosen], wanted.batch
            if not x.shape[0]:
                return x
        self.attention.attend(qkv, x, layer, batch, cache)
        self.mlp(x)
        return x

    @property
    def linears(self) -> dict[str, Linear]:
        """Its linear layers, by what they are called in reports."""
        return {
            "queries, keys, values": self.attention.qkv,
            "attention's output": self.attention.output,
            "gate and up": self.mlp.gate_up,
            "down": self.mlp.down,
        }
