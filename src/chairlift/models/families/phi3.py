"""Phi-3: Llama with q, k and v in one matrix, gate and up in another; some sizes rotate a part of each head."""

from __future__ import annotations

from chairlift.models.blocks import Attention, Block, CacheSpec, GatedMlp
from chairlift.models.bounds import MAX_LENGTH
from chairlift.models.building import Split, Take, column_linear, embedding_and_head, row_linear
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder
from chairlift.models.rope import RopeConfig
from chairlift.ops.linear import Linear
from chairlift.ops.norm import Norm
from chairlift.ops.scoring import Scoring
from chairlift.ops.weight import SILU, Weight


def build(config: ModelConfig, take: Take) -> Decoder:
    """Build the decoder."""
    hidden, rope = config.hidden_size, RopeConfig.read(config.values, config.head_dim)
    blocks = [_block(config, take, f"model.layers.{i}.", rope) for i in range(config.layers)]
    norm = Norm(take.tensor("model.norm.weight", hidden), config.norm_eps)
    return Decoder(config, *embedding_and_head(config, take, norm), blocks, group=take.group)


def _block(config: ModelConfig, take: Take, prefix: str, rope: RopeConfig) -> Block:
    hidden, dim, inner = config.hidden_size, config.head_dim, config.inner_size
    q, kv = config.heads * dim, config.kv_heads * dim
    window = config.values.count("sliding_window", 0, least=0, most=MAX_LENGTH)

    def norm(name: str) -> Norm:
        return Norm(take.tensor(f"{prefix}{name}.weight", hidden), config.norm_eps)

    qkv = take.weight(f"{prefix}self_attn.qkv_proj.weight", (q, kv, kv), hidden, Split.OUTPUTS)
    return Block(
        Attention(
            Linear(_halves(qkv, config, rope.rotated(dim)), norm=norm("input_layernorm")),
            row_linear(take, f"{prefix}self_attn.o_proj", hidden, q),
            config.heads,
            CacheSpec(config.kv_heads, dim, window),
            rope,
            Scoring.default(dim),
        ),
        GatedMlp(
            column_linear(
                take,
                f"{prefix}mlp.",
                {"gate_up_proj": (inner, inner)},
                hidden,
                norm=norm("post_attention_layernorm"),
                gate=SILU,
            ),
            row_linear(take, f"{prefix}mlp.down_proj", hidden, inner),
        ),
    )


def _halves(qkv: Weight, config: ModelConfig, rotated: int) -> Weight:
    """Reorder the rows of query and key heads so that each half of a head begins with a half of its rotated part.

    Our kernels rotate element i with element i + dim / 2. The same order in queries and keys does not change their
    products.
    """
    dim, half = config.head_dim, rotated // 2
    if rotated == dim:
        return qkv
    cuts = ((0, half), (rotated, (rotated + dim) // 2), (half, rotated), ((rotated + dim) // 2, dim))
    rotated_rows = (config.heads + config.kv_heads) * dim
    parts = [qkv.rows(head + first, head + last) for head in range(0, rotated_rows, dim) for first, last in cuts]
    return parts[0].join([*parts[1:], qkv.rows(rotated_rows, qkv.shape[0])])
