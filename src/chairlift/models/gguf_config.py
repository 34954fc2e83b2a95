"""What a GGUF file says about its model, in the words of a Hugging Face config.json and its tensor names."""

import re
from typing import Any

import numpy as np
import torch

from chairlift.core.errors import ModelError
from chairlift.models.gguf import GgufFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

INTERLEAVED = ("llama", "mistral")
"""Families whose converters reorder the rows of attn_q and attn_k, from rotated halves to rotated neighbours."""

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies (Llama 3): a tensor in GGUF, part of the config in Hugging Face's words."""


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor.

    >>> hf_name("blk.3.ffn_up.weight")
    'model.layers.3.mlp.up_proj.weight'
    """
    if gguf_name in TOP_NAMES:
        return TOP_NAMES[gguf_name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
    if match is None or match[2] not in LAYER_NAMES:
        raise ModelError(f"tensor {gguf_name} belongs to no family that is read ({', '.join(ARCHITECTURES)})")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


def hf_layout(weights: torch.Tensor, gguf_name: str, config: dict[str, Any]) -> torch.Tensor:
    """Put the rows of a query or key projection back into Hugging Face's order, where converters change it."""
    heads = _heads(gguf_name, config)
    if heads is None or config["model_type"] not in INTERLEAVED:
        return weights
    # In the file a head's rows alternate between its two halves; the model rotates one half against the other.
    pairs = weights.view(heads, int(config["head_dim"]) // 2, 2, *weights.shape[1:])
    return pairs.transpose(1, 2).reshape(weights.shape)


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The config.json that the model in a GGUF file would have."""
    facts = _Facts(file)
    heads = facts.count("attention.head_count")
    hidden = facts.count("embedding_length")
    window = facts.count("attention.sliding_window") if facts.get("attention.sliding_window") else None
    # Llama has no window: a llama file with one is a Mistral, which converters store under that name.
    family = "mistral" if facts.family == "llama" and window else facts.family
    first = file.tensors.get("blk.0.attn_q.weight")
    dtype = first.type.plain if first and first.type.plain else torch.bfloat16
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": _vocabulary(file),
        "hidden_size": hidden,
        "intermediate_size": facts.count("feed_forward_length"),
        "num_hidden_layers": facts.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.count("attention.head_count_kv", heads),
        "head_dim": facts.count("attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "rms_norm_eps": facts.decimal("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": facts.decimal("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(facts),
        "max_position_embeddings": facts.count("context_length"),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        # In Hugging Face's words: on all four projections. Qwen2 has biases on q, k and v by its architecture alone.
        "attention_bias": family != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **_special_tokens(facts),
    }
    _check_heads(file, config, facts.count("rope.dimension_count", config["head_dim"]))
    if ROPE_FACTORS in file.tensors:
        config["rope_freq_factors"] = file.read(ROPE_FACTORS).tolist()
    return config


class _Facts:
    """The metadata of one model, with errors that name the file and the key."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self.metadata = file.metadata
        self.family = str(self.metadata.get("general.architecture"))
        if self.family not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ModelError(f"{self.path}: architecture {self.family!r} is not supported; those that are: {known}")
        if self.get("expert_count"):
            raise ModelError(f"{self.path} is a mixture of experts, which is not supported: use a dense model")
        parts = self.metadata.get("split.count")
        if parts not in (None, 0, 1):
            raise ModelError(
                f"{self.path} is one of {parts} parts: merge them with `llama-gguf-split --merge`, or fetch one file"
            )

    def get(self, key: str) -> Any:
        """The value of one of the family's keys, or None."""
        return self.metadata.get(f"{self.family}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number, the same for all layers."""
        value = self.get(key)
        if value is None:
            value = default
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or value < 1:
            said = "is missing" if value is None else f"is {value!r}"
            raise ModelError(
                f"{self.path}: {self.family}.{key} {said} and must be one positive number: not a usable model"
            )
        return value

    def decimal(self, key: str, default: float) -> float:
        """A float as its author wrote it: 1e-05, where the file's 32 bits hold 9.99999974e-06."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, float | int) or not np.isfinite(value):
            raise ModelError(f"{self.path}: {self.family}.{key} is {value!r} and must be a number: not a usable model")
        return float(str(np.float32(value)))

    def token(self, key: str) -> int | None:
        """The id of a special token."""
        value = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        return value if isinstance(value, int) else None


def _vocabulary(file: GgufFile) -> int:
    """The size of the embedding, which is what counts; some files do not say it elsewhere."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight: it is not a whole language model")
    return embedding.shape[0]


def _rope_scaling(facts: _Facts) -> dict[str, Any] | None:
    """How positions are stretched beyond the trained length."""
    kind = facts.get("rope.scaling.type")
    old_factor = facts.decimal("rope.scale_linear", 1.0)  # the key before there were types
    factor = facts.decimal("rope.scaling.factor", old_factor)
    if kind in (None, "none") and old_factor != 1.0:
        kind = "linear"
    if kind in (None, "none") or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        raise ModelError(f"{facts.path}: rope scaling {kind!r} is not supported; linear and yarn are")
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": facts.count("rope.scaling.original_context_length"),
    }
    for key in ("beta_fast", "beta_slow"):
        if facts.get(f"rope.scaling.yarn_{key}") is not None:
            scaling[key] = facts.decimal(f"rope.scaling.yarn_{key}", 1.0)
    return scaling


def _special_tokens(facts: _Facts) -> dict[str, Any]:
    """Where texts begin and end; a chat model may end a turn with another token than a text."""
    ends = [facts.token(key) for key in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": facts.token("bos"),
        "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
        "pad_token_id": facts.token("padding"),
    }


def _heads(gguf_name: str, config: dict[str, Any]) -> int | None:
    """How many heads the rows of a query or key projection are; None for any other tensor."""
    if ".attn_q." in gguf_name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".attn_k." in gguf_name else None


def _check_heads(file: GgufFile, config: dict[str, Any], rotated: int) -> None:
    """Whether the projections are as large as the heads in the metadata say, and rotate as a whole."""
    if rotated != config["head_dim"] or rotated % 2:
        raise ModelError(
            f"{file.path} rotates {rotated} of {config['head_dim']} dimensions of a head; only all of them is supported"
        )
    for tensor in file.tensors.values():
        heads = _heads(tensor.name, config)
        if heads is not None and tensor.shape[0] != heads * rotated:
            raise ModelError(
                f"{file.path}: tensor {tensor.name} has {tensor.shape[0]} rows, but {heads} heads of {rotated} "
                f"are {heads * rotated}: the file is damaged; fetch it again"
            )
