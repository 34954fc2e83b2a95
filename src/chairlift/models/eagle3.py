"""EAGLE-3 heads: one layer that drafts from the hidden states of three of the model's layers.

At position i the head reads the states that the model computed for token i and the embedding of token i + 1, and its
own output predicts token i + 2. Behind the last state of the model it reads its own output in place of a state, so it
can draft a chain. Its vocabulary may be a part of the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from chairlift.models.blocks import Attention, CacheSpec, GatedMlp
from chairlift.models.building import Split, Take, column_linear, row_linear
from chairlift.models.config import ModelConfig
from chairlift.models.rope import RopeConfig, rope_tables
from chairlift.ops.batch import Batch
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.linear import Linear
from chairlift.ops.norm import Norm, rms_norm
from chairlift.ops.scoring import Scoring
from chairlift.ops.weight import SILU, Weight

STATES = 3  # layers of the model that a head reads


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The sizes of a head."""

    layer: ModelConfig  # of its one layer, with the vocabulary of the model
    layers: tuple[int, ...]  # it reads the inputs of these layers of the model
    state_size: int  # elements of each of them
    vocab_size: int  # tokens that it can draft
    keeps_norm: bool  # whether the residual is the normed state
    has_bias: bool  # of `fc`
    has_embedding: bool  # else it uses the model's


class Eagle3Head:
    """Computes drafts. Its keys and values are one more layer of the model's KV cache, `slot`."""

    def __init__(self, config: HeadConfig, take: Take, embedding: Weight, slot: int) -> None:
        layer, hidden = config.layer, config.layer.hidden_size
        q, kv, dim = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.head_dim
        attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
        has_bias = layer.values.flag("attention_bias")
        self.config = config
        self.slot = slot
        self._embedding = embedding
        if config.has_embedding:
            self._embedding = take.vocabulary("embed_tokens.weight", layer.vocab_size, hidden)
        self._token_norm, self._state_norm, mlp_norm, norm = (
            Norm(take.tensor(name, hidden), layer.norm_eps)
            for name in (
                "midlayer.input_layernorm.weight",
                "midlayer.hidden_norm.weight",
                "midlayer.post_attention_layernorm.weight",
                "norm.weight",
            )
        )
        fuse = take.weight("fc.weight", hidden, STATES * config.state_size, Split.OUTPUTS)
        self._fuse = Linear(fuse, take.bias("fc.bias", hidden) if config.has_bias else None)
        self._attention = Attention(
            column_linear(take, attention, {"q_proj": q, "k_proj": kv, "v_proj": kv}, 2 * hidden, bias=has_bias),
            row_linear(take, f"{attention}o_proj", hidden, q, bias=has_bias),
            layer.heads,
            CacheSpec(layer.kv_heads, dim),
            RopeConfig.read(layer.values, dim),
            Scoring.default(dim),
        )
        outputs, has_bias = {"gate_proj": layer.inner_size, "up_proj": layer.inner_size}, layer.values.flag("mlp_bias")
        self._mlp = GatedMlp(
            column_linear(take, mlp, outputs, hidden, bias=has_bias, norm=mlp_norm, gate=SILU),
            row_linear(take, f"{mlp}down_proj", hidden, layer.inner_size, bias=has_bias),
        )
        self._head = Linear(take.vocabulary("lm_head.weight", config.vocab_size, hidden), norm=norm)
        self.ids: torch.Tensor | None = None  # of the model, by the head's own; None: they are the same

    def prepare(self, max_length: int, device: torch.device, *, is_compiled: bool) -> None:
        """Compute the rotary tables; `is_compiled` if the model's ops are compiled CPU kernels on NumPy arrays."""
        self._is_compiled = is_compiled
        attention = self._attention
        cos, sin = rope_tables(attention.rope, attention.spec.head_dim, max_length, device)
        attention.tables = (cos.numpy(), sin.numpy()) if is_compiled else (cos, sin)
        attention.norm_weights = None

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Return one state [tokens, hidden] for the states of the three layers [tokens, 3 * size]."""
        return self._fuse(states)

    def store(self, states: torch.Tensor, following: torch.Tensor, batch: Batch, cache: KvCache) -> None:
        """Write the keys and values of a batch's positions: fused states, and the tokens behind them."""
        self._store(states, following, batch, cache)

    def __call__(self, states: torch.Tensor, following: torch.Tensor, batch: Batch, cache: KvCache) -> torch.Tensor:
        """Return the output of a batch's positions: the states of the next ones, and what `logits` takes."""
        qkv, residual = self._store(states, following, batch, cache)
        x = self._as_array(residual.clone())
        self._attention.attend(qkv, x, self.slot, batch, cache)
        self._mlp(x)
        return torch.from_numpy(x) if self._is_compiled else x

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Return the logits [rows, tokens that the head can draft]."""
        return self._head(output)

    def widen(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits over the model's vocabulary: tokens that the head cannot draft have -inf."""
        if self.ids is None:
            return logits
        wide = logits.new_full((logits.shape[0], self.config.layer.vocab_size), -torch.inf)
        wide[:, self.ids] = logits
        return wide

    def _store(
        self, states: torch.Tensor, following: torch.Tensor, batch: Batch, cache: KvCache
    ) -> tuple[Any, torch.Tensor]:
        embedded = rms_norm(self._embedding.lookup(following), self._token_norm)
        normed = rms_norm(states, self._state_norm)
        both = self._as_array(torch.cat((embedded, normed), dim=-1))
        qkv = self._attention.store(both, self.slot, batch, cache)
        return qkv, normed if self.config.keeps_norm else states

    def _as_array(self, tensor: torch.Tensor) -> Any:
        return tensor.numpy() if self._is_compiled else tensor
