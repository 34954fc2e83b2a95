"""Tiny GGUF models that tests write."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY = 32, 4, 2, 8, 48, 40


def hf_tensors(seed: int = 0, *, bias: bool = False, head_norms: bool = False) -> dict[str, np.ndarray]:
    """Return a tiny decoder of one layer, with GGUF's names but Hugging Face's row order."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up.weight": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FEED_FORWARD),
    }
    if bias:
        shapes |= {"blk.0.attn_q.bias": (HEADS * HEAD_DIM,), "blk.0.attn_k.bias": (KV_HEADS * HEAD_DIM,)}
    if head_norms:
        shapes |= {"blk.0.attn_q_norm.weight": (HEAD_DIM,), "blk.0.attn_k_norm.weight": (HEAD_DIM,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path, arch: str, tensors: dict[str, np.ndarray], more: Callable[[GGUFWriter], object] = lambda writer: None
) -> Path:
    writer = GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    more(writer)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_llama_converters_do(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Reorder rows as converters do: row 2i of a head is row i of its first half, row 2i + 1 of its second."""
    half = HEAD_DIM // 2
    order = [row for i in range(half) for row in (i, half + i)]
    changed = dict(tensors)
    for name in tensors:
        if ".attn_q." in name or ".attn_k." in name:
            heads = tensors[name].reshape(-1, HEAD_DIM, *tensors[name].shape[1:])
            changed[name] = np.ascontiguousarray(heads[:, order]).reshape(tensors[name].shape)
    return changed
