"""Gemma 2 and 3: norms around every sublayer, windows in most layers, softcaps (2) or a QK norm (3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chairlift.core.values import Values
from chairlift.models.blocks import Attention, Block, CacheSpec, GatedMlp
from chairlift.models.bounds import MAX_LAYERS, MAX_LENGTH
from chairlift.models.building import Take, column_linear, embedding_and_head, row_linear
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder
from chairlift.models.rope import RopeConfig
from chairlift.ops.norm import Norm
from chairlift.ops.scoring import Scoring
from chairlift.ops.weight import GELU_TANH

_KINDS = ("sliding_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class Gemma:
    """Builds a Gemma decoder."""

    qk_norm: bool  # Gemma 3, which also has a separate rope for layers with a window
    pattern: int  # every pattern-th layer has no window
    caps: tuple[float, float] = (0.0, 0.0)  # default softcaps of scores and logits; null in the config means none

    def __call__(self, config: ModelConfig, take: Take) -> Decoder:
        """Build the decoder."""
        values, hidden = config.values, config.hidden_size
        if values.text("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            raise values.wrong("hidden_activation", "use gelu_pytorch_tanh")
        window = values.count("sliding_window", 4096, most=MAX_LENGTH)
        scalar = values.number("query_pre_attn_scalar", 256.0)
        scoring = Scoring(scalar**-0.5, self._cap(values, "attn_logit_softcapping", self.caps[0]))
        ropes = {kind: self._rope(config, kind) for kind in _KINDS}
        blocks = [
            self._block(config, take, f"model.layers.{i}.", ropes[kind], window if kind == _KINDS[0] else 0, scoring)
            for i, kind in enumerate(self._kinds(config))
        ]
        ends = embedding_and_head(config, take, _norm(config, take, "model.norm", hidden))
        cap = self._cap(values, "final_logit_softcapping", self.caps[1])
        return Decoder(config, *ends, blocks, embedding_scale=hidden**0.5, logit_cap=cap, group=take.group)

    def _cap(self, values: Values, key: str, usual: float) -> float:
        return values.number(key) if values.has(key) else 0.0 if values.has_key(key) else usual

    def _kinds(self, config: ModelConfig) -> list[str]:
        """Return the kind of each layer."""
        values, layers = config.values, config.layers
        kinds = values.texts("layer_types")
        if kinds and (len(kinds) != layers or not {*_KINDS}.issuperset(kinds)):
            raise values.wrong("layer_types", f"use one of {', '.join(_KINDS)} for each of the {layers} layers")
        pattern = values.count("sliding_window_pattern", self.pattern, most=MAX_LAYERS)
        return kinds or [_KINDS[0] if (i + 1) % pattern else _KINDS[1] for i in range(layers)]

    def _rope(self, config: ModelConfig, kind: str) -> RopeConfig:
        """Read the rope of a kind of layer: in Gemma 3 layers with a window have their own base and no scaling."""
        values, dim = config.values, config.head_dim
        if not self.qk_norm:
            return RopeConfig.read(values, dim)
        if values.part("rope_parameters").has(kind):
            return RopeConfig.read(values, dim, values.part("rope_parameters").part(kind))
        if kind == _KINDS[0]:
            return RopeConfig(values.number("rope_local_base_freq", 10_000.0, above=1.0))
        return RopeConfig.read(values, dim, values.part("rope_scaling"), theta=1_000_000.0)

    def _block(
        self, config: ModelConfig, take: Take, prefix: str, rope: RopeConfig, window: int, scoring: Scoring
    ) -> Block:
        hidden, dim, inner = config.hidden_size, config.head_dim, config.inner_size
        q, kv = config.heads * dim, config.kv_heads * dim
        has_bias = config.values.flag("attention_bias")
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

        def norm(name: str, size: int = hidden) -> Norm:
            return _norm(config, take, f"{prefix}{name}", size)

        projections, halves = {"q_proj": q, "k_proj": kv, "v_proj": kv}, {"gate_proj": inner, "up_proj": inner}
        return Block(
            Attention(
                column_linear(take, attention, projections, hidden, bias=has_bias, norm=norm("input_layernorm")),
                row_linear(
                    take, f"{attention}o_proj", hidden, q, bias=has_bias, output_norm=norm("post_attention_layernorm")
                ),
                config.heads,
                CacheSpec(config.kv_heads, dim, window),
                rope,
                scoring,
                (norm("self_attn.q_norm", dim), norm("self_attn.k_norm", dim)) if self.qk_norm else None,
            ),
            GatedMlp(
                column_linear(take, mlp, halves, hidden, norm=norm("pre_feedforward_layernorm"), gate=GELU_TANH),
                row_linear(take, f"{mlp}down_proj", hidden, inner, output_norm=norm("post_feedforward_layernorm")),
            ),
        )


def _norm(config: ModelConfig, take: Take, name: str, size: int) -> Norm:
    """Return a norm with factor 1 + stored weight, in float32: in 16 bits, 1 + w would lose most of w."""
    return Norm(take.tensor(f"{name}.weight", size, dtype=torch.float32) + 1.0, config.norm_eps)
