"""Llama and families close to it: Mistral, Qwen2, Qwen3, SmolLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chairlift.core.values import Values
from chairlift.models.blocks import Attention, Block, CacheSpec, GatedMlp
from chairlift.models.bounds import MAX_LAYERS, MAX_LENGTH
from chairlift.models.building import Take, column_linear, embedding_and_head, row_linear
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder
from chairlift.models.rope import RopeConfig
from chairlift.ops.norm import Norm
from chairlift.ops.scoring import Scoring
from chairlift.ops.weight import SILU


def no_window(_values: Values, layers: int) -> list[int]:
    """Return no window for every layer."""
    return [0] * layers


def same_window(values: Values, layers: int) -> list[int]:
    """Return the config's window, if any, for every layer."""
    return [values.count("sliding_window", 0, least=0, most=MAX_LENGTH)] * layers


def qwen_windows(values: Values, layers: int) -> list[int]:
    """Return a window for layers from max_window_layers on, if use_sliding_window is set."""
    is_used = values.flag("use_sliding_window")
    window = values.count("sliding_window", 0, least=0, most=MAX_LENGTH)
    first = values.count("max_window_layers", layers, least=0, most=MAX_LAYERS)
    kinds = values.texts("layer_types")
    if kinds and len(kinds) != layers:
        raise values.wrong("layer_types", f"use one entry for each of the {layers} layers")
    if not is_used:
        return [0] * layers
    slides = [kind == "sliding_attention" for kind in kinds] or [layer >= first for layer in range(layers)]
    return [window if each else 0 for each in slides]


@dataclass(frozen=True, slots=True)
class Llama:
    """Builds a Llama-like decoder."""

    qkv_bias: bool = False
    qk_norm: bool = False
    windows: Callable[[Values, int], list[int]] = no_window

    def __call__(self, config: ModelConfig, take: Take) -> Decoder:
        """Build the decoder."""
        values, hidden = config.values, config.hidden_size
        rope = RopeConfig.read(values, config.head_dim)
        windows = self.windows(values, config.layers)
        blocks = [self._block(config, take, f"model.layers.{i}.", rope, windows[i]) for i in range(config.layers)]
        norm = Norm(take.tensor("model.norm.weight", hidden), config.norm_eps)
        return Decoder(config, *embedding_and_head(config, take, norm), blocks, group=take.group)

    def _block(self, config: ModelConfig, take: Take, prefix: str, rope: RopeConfig, window: int) -> Block:
        hidden, dim, inner = config.hidden_size, config.head_dim, config.inner_size
        has_bias, mlp_bias = config.values.flag("attention_bias"), config.values.flag("mlp_bias")
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        q, kv = config.heads * dim, config.kv_heads * dim

        def norm(name: str, size: int) -> Norm:
            return Norm(take.tensor(f"{prefix}{name}.weight", size), config.norm_eps)

        return Block(
            Attention(
                column_linear(
                    take,
                    attention,
                    {"q_proj": q, "k_proj": kv, "v_proj": kv},
                    hidden,
                    bias=has_bias or self.qkv_bias,
                    norm=norm("input_layernorm", hidden),
                ),
                row_linear(take, f"{attention}o_proj", hidden, q, bias=has_bias),
                config.heads,
                CacheSpec(config.kv_heads, dim, window),
                rope,
                Scoring.default(dim),
                (norm("self_attn.q_norm", dim), norm("self_attn.k_norm", dim)) if self.qk_norm else None,
            ),
            GatedMlp(
                column_linear(
                    take,
                    mlp,
                    {"gate_proj": inner, "up_proj": inner},
                    hidden,
                    bias=mlp_bias,
                    norm=norm("post_attention_layernorm", hidden),
                    gate=SILU,
                ),
                row_linear(take, f"{mlp}down_proj", hidden, inner, bias=mlp_bias),
            ),
        )
