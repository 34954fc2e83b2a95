"""The decoder: embedding, blocks and head, on a flat batch and a paged KV cache."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch

from chairlift.models.blocks import Block, CacheSpec
from chairlift.models.cache_layout import CacheLayout
from chairlift.models.config import ModelConfig
from chairlift.models.rope import rope_tables
from chairlift.ops.batch import Batch, SampledTokens
from chairlift.ops.group import Group
from chairlift.ops.kv_cache import KvCache, bytes_per_token
from chairlift.ops.linear import Linear
from chairlift.ops.vocabulary import embed, join_logits
from chairlift.ops.weight import Weight


class Decoder:
    """Computes hidden states and logits of tokens, and writes their keys and values to the cache."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Weight,
        head: Linear,
        blocks: list[Block],
        *,
        embedding_scale: float | None = None,
        logit_cap: float = 0.0,
        group: Group | None = None,
    ) -> None:
        self.config = config  # with the heads and the inner size of this rank
        self.group = group  # None: this process has the whole model
        self.embedding = embedding
        self.blocks = blocks
        self.head = head  # including the norm before it
        self.layout = CacheLayout.of(self.specs)
        self.device = embedding.device
        self.is_compiled = self.device.type == "cpu" and config.dtype == torch.float32
        # Rounded to the model's dtype before it multiplies, as in Gemma.
        self._scale = None if embedding_scale is None else float(torch.tensor(embedding_scale, dtype=config.dtype))
        self._logit_cap = logit_cap
        self.read_layers: tuple[int, ...] = ()  # a draft head, if there is one, reads the inputs of these layers

    def serve_head(self, layers: tuple[int, ...]) -> None:
        """Keep one more layer in the KV cache, for a draft head that reads the inputs of these layers."""
        self.read_layers = layers

    def prepare(self, max_length: int) -> None:
        """Compute the rotary tables for up to `max_length` tokens, shared by layers with the same rope."""
        tables: dict[int, tuple[Any, Any]] = {}
        for attention in (block.attention for block in self.blocks):
            key = id(attention.rope)
            if key not in tables:
                cos, sin = rope_tables(attention.rope, attention.spec.head_dim, max_length, self.device)
                tables[key] = self._as_array(cos), self._as_array(sin)
            attention.tables = tables[key]
            norms = attention.norms
            attention.norm_weights = norms and (self._as_array(norms[0].weight), self._as_array(norms[1].weight))

    @property
    def specs(self) -> list[CacheSpec]:
        """The KV cache spec of each layer."""
        return [block.attention.spec for block in self.blocks]

    @property
    def query_width(self) -> int:
        """Elements of a token's queries in all layers, for counting attention's operations."""
        return sum(block.attention.heads * block.attention.spec.head_dim for block in self.blocks)

    @property
    def layer_weights(self) -> int:
        """Elements of all layers' matrices: multiply-adds per token."""
        return sum(math.prod(linear.shape) for block in self.blocks for linear in block.linears.values())

    @property
    def formats(self) -> dict[str, int]:
        """Bytes of the matrices that a step reads, those of all layers and the head, by format."""
        linears = [linear for block in self.blocks for linear in block.linears.values()]
        return sum((Counter(linear.formats) for linear in (*linears, self.head)), Counter())

    @property
    def read_bytes(self) -> int:
        """Bytes of the matrices that a step reads."""
        return sum(self.formats.values())

    def kv_bytes_per_token(self, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of one token's keys and values in all layers, in the model's dtype by default."""
        return bytes_per_token(len(self.blocks) + self._head_layers, *self._kv_shape, dtype or self.config.dtype)

    def kv_bytes_per_block(self, block_size: int, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of one block, in the model's dtype by default: it has the layers of one group."""
        return block_size * bytes_per_token(self._cache_layers, *self._kv_shape, dtype or self.config.dtype)

    def make_cache(self, blocks: int, block_size: int, dtype: torch.dtype | None = None) -> KvCache:
        """Return a KV cache for this decoder, in the model's dtype by default."""
        (kv_heads, head_dim), width, kind = self._kv_shape, self._cache_layers, dtype or self.config.dtype
        return KvCache(width, blocks, kv_heads, head_dim, block_size, kind, self.device, compiled=self.is_compiled)

    @property
    def _head_layers(self) -> int:
        return 1 if self.read_layers else 0

    @property
    def _cache_layers(self) -> int:
        """Layers in a block."""
        return self.layout.width + self._head_layers

    @property
    def _kv_shape(self) -> tuple[int, int]:
        shapes = {(spec.kv_heads, spec.head_dim) for spec in self.specs}
        assert len(shapes) == 1, "layers with keys and values of different shapes would need several caches"
        return shapes.pop()

    def forward(
        self,
        tokens: torch.Tensor,
        batch: Batch,
        cache: KvCache,
        wanted: SampledTokens | None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the last hidden states [tokens, hidden] of a flat batch, or of the `wanted` tokens alone.

        The inputs of the layers that a draft head reads are written side by side to `states`.
        """
        embedded = embed(tokens, self.embedding, self.group)
        if self._scale is not None:
            embedded *= self._scale
        x = self._as_array(embedded)  # the residual: layers add to it in place
        last, batches = self.blocks[-1], (batch, *batch.others)
        for number, (block, group, slot) in enumerate(
            zip(self.blocks, self.layout.groups, self.layout.slots, strict=True)
        ):
            if states is not None:
                self._keep(number, x, states)
            x = block(x, slot, batches[group], cache, wanted if block is last else None)
        return torch.from_numpy(x) if self.is_compiled else x

    def _keep(self, number: int, x: Any, states: torch.Tensor) -> None:
        """Copy a layer's input, which later layers change in place, to its columns of `states`."""
        for place, layer in enumerate(self.read_layers):
            if layer == number:
                width = x.shape[1]
                states[:, place * width : (place + 1) * width] = torch.from_numpy(x) if self.is_compiled else x

    def select(self, batch: Batch, chosen: np.ndarray) -> SampledTokens:
        """Select the tokens of a batch for which `forward` returns the last hidden states."""
        return (batch, *batch.others)[self.layout.groups[-1]].only(chosen)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [rows, vocabulary] of some rows' hidden states in the model's dtype; in `out` if given.

        Of several ranks, only rank 0 gets them: the others get those of their part of the vocabulary.
        """
        found = self.head(hidden) if out is None or self.group is not None else self.head.into(hidden, out)
        if self._logit_cap:
            found.div_(self._logit_cap).tanh_().mul_(self._logit_cap)
        return found if self.group is None else join_logits(found, self.config.vocab_size, self.group, out)

    def _as_array(self, tensor: torch.Tensor) -> Any:
        """Return a tensor as a NumPy array if the ops are compiled CPU kernels, else unchanged."""
        return tensor.numpy() if self.is_compiled else tensor
