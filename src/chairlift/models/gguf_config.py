"""Conversion of GGUF metadata to a Hugging Face config.json, and of GGUF tensor names to Hugging Face's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from chairlift.core.errors import ModelError
from chairlift.core.values import Values, show
from chairlift.models.bounds import MAX_HEADS, MAX_LAYERS, MAX_LENGTH
from chairlift.models.gguf import GgufFile

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

INTERLEAVED = ("llama", "mistral")
"""Families for which converters reorder the rows of attn_q and attn_k, from rotated halves to rotated neighbours."""

GLOBAL_NAMES = {
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
"""Divisors of the rotary frequencies (Llama 3): a tensor in GGUF, part of the config in Hugging Face's format."""


def hf_name(gguf_name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor.

    >>> hf_name("blk.3.ffn_up.weight")
    'model.layers.3.mlp.up_proj.weight'
    """
    if gguf_name in GLOBAL_NAMES:
        return GLOBAL_NAMES[gguf_name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
    if match is None or match[2] not in LAYER_NAMES:
        raise ModelError(f"tensor {gguf_name} belongs to no supported family ({', '.join(ARCHITECTURES)})")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


def hf_layout(weights: torch.Tensor, gguf_name: str, config: dict[str, Any]) -> torch.Tensor:
    """Restore Hugging Face's row order of a query or key projection that a converter has reordered."""
    if _heads(gguf_name, config) is None or config["model_type"] not in INTERLEAVED:
        return weights
    # In the file a head's rows alternate between its two halves; the model rotates one half against the other.
    pairs = weights.view(-1, int(config["head_dim"]) // 2, 2, *weights.shape[1:])
    return pairs.transpose(1, 2).reshape(weights.shape)


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Return the config.json that corresponds to a GGUF file."""
    family, facts = _facts(file)
    heads = facts.count("attention.head_count", most=MAX_HEADS)
    hidden = facts.count("embedding_length")
    window = facts.count("attention.sliding_window", 0, least=0, most=MAX_LENGTH) or None
    # Llama has no window: converters store Mistral, which has one, as llama.
    family = "mistral" if family == "llama" and window else family
    first = file.tensors.get("blk.0.attn_q.weight")
    dtype = first.type.plain if first and first.type.plain else "bfloat16"
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": _vocabulary(file),
        "hidden_size": hidden,
        "intermediate_size": facts.count("feed_forward_length"),
        "num_hidden_layers": _layers(file, facts),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.count("attention.head_count_kv", heads, most=MAX_HEADS),
        "head_dim": facts.count("attention.key_length", hidden // heads, most=MAX_HEADS),
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(facts, "attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": _decimal(facts, "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(facts),
        "max_position_embeddings": facts.count("context_length", most=MAX_LENGTH),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        # attention_bias means all four projections; Qwen2 has biases of q, k and v without this setting.
        "attention_bias": family != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "torch_dtype": dtype,
        **_special_tokens(file),
    }
    _check_heads(file, config, facts.count("rope.dimension_count", config["head_dim"], most=MAX_HEADS))
    if ROPE_FACTORS in file.tensors:
        config["rope_freq_factors"] = _rope_factors(file, config["head_dim"])
    return config


def _facts(file: GgufFile) -> tuple[str, Values]:
    """Return the model's family, and the metadata under the family's prefix."""
    general = Values(file.path, file.metadata)
    family = general.text("general.architecture", "(none named)")
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{file.path}: architecture {show(family)} is not supported; supported are {known}")
    parts = general.count("split.count", 0, least=0)
    if parts > 1:
        raise ModelError(
            f"{file.path} is one of {parts} parts: merge them with `llama-gguf-split --merge`, or fetch one file"
        )
    prefix = f"{family}."
    found = {
        key.removeprefix(prefix): _of_all_layers(value)
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    facts = Values(file.path, found, prefix)
    if facts.count("expert_count", 0, least=0):
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported: use a dense model")
    return family, facts


def _of_all_layers(value: Any) -> Any:
    """Return the common value of a per-layer list, or the value unchanged."""
    return value[0] if isinstance(value, list) and len(set(value)) == 1 else value


def _decimal(facts: Values, key: str, default: float) -> float:
    """Read a float32 as its shortest decimal: 1e-05 where the file has 9.99999974e-06."""
    return float(str(np.float32(facts.number(key, default))))


def _layers(file: GgufFile, facts: Values) -> int:
    """Read the number of layers, and check that the file has tensors for all of them."""
    layers = facts.count("block_count", most=MAX_LAYERS)
    held = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if layers > held:
        raise facts.wrong("block_count", f"the file holds tensors of {held} layers; fetch it again")
    return layers


def _rope_factors(file: GgufFile, head_dim: int) -> list[float]:
    """Read the divisors of the rotary frequencies."""
    shape = file.tensors[ROPE_FACTORS].shape
    if shape != (head_dim // 2,):
        raise ModelError(
            f"{file.path}: tensor {ROPE_FACTORS} has shape {shape}, but heads of {head_dim} have {head_dim // 2} "
            "frequencies: the file is damaged; fetch it again"
        )
    factors: list[float] = file.read(ROPE_FACTORS).tolist()
    return factors


def _vocabulary(file: GgufFile) -> int:
    """Return the vocabulary size, from the embedding: some files have it nowhere else."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight: it is not a whole language model")
    return embedding.shape[0]


def _rope_scaling(facts: Values) -> dict[str, Any] | None:
    """Return the rope_scaling of config.json, or None."""
    kind = facts.text("rope.scaling.type", "none")
    old_factor = _decimal(facts, "rope.scale_linear", 1.0)  # the key of older files, without a type
    factor = _decimal(facts, "rope.scaling.factor", old_factor)
    if kind == "none" and old_factor != 1.0:
        kind = "linear"
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        raise ModelError(f"{facts.file}: rope scaling {show(kind)} is not supported; linear and yarn are")
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": facts.count("rope.scaling.original_context_length", most=MAX_LENGTH),
    }
    for key in ("beta_fast", "beta_slow"):
        if facts.has(f"rope.scaling.yarn_{key}"):
            scaling[key] = _decimal(facts, f"rope.scaling.yarn_{key}", 1.0)
    return scaling


def _special_tokens(file: GgufFile) -> dict[str, Any]:
    """Return the special token ids; eot and eom, which end a chat turn, count as eos too."""
    metadata, vocabulary = Values(file.path, file.metadata), _vocabulary(file)

    def token(key: str) -> int | None:
        return next(iter(metadata.ids(f"tokenizer.ggml.{key}_token_id", vocabulary)), None)

    ends = [token(key) for key in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": token("bos"),
        "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
        "pad_token_id": token("padding"),
    }


def _heads(gguf_name: str, config: dict[str, Any]) -> int | None:
    """Return the number of heads of a query or key projection; None for any other tensor."""
    if ".attn_q." in gguf_name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".attn_k." in gguf_name else None


def _check_heads(file: GgufFile, config: dict[str, Any], rotated: int) -> None:
    """Check that projections have the size that the metadata's heads imply, and that whole heads are rotated."""
    if rotated != config["head_dim"] or rotated % 2:
        raise ModelError(
            f"{file.path} rotates {rotated} of {config['head_dim']} dimensions of a head; only whole heads work"
        )
    for tensor in file.tensors.values():
        heads = _heads(tensor.name, config)
        if heads is not None and tensor.shape[0] != heads * rotated:
            raise ModelError(
                f"{file.path}: tensor {tensor.name} has {tensor.shape[0]} rows, but {heads} heads of {rotated} "
                f"are {heads * rotated}: the file is damaged; fetch it again"
            )
