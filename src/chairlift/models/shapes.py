"""Shapes of well-known models, for measuring speed with random weights and no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chairlift.core.errors import ModelError
from chairlift.json_file import read_json

SHAPES: dict[str, dict[str, Any]] = {
    "stories15m": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 288,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 48,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,  # trained with 256, which does not matter with random weights
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 2,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "eos_token_id": 2,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 128001,
    },
}
# A draft model for Llama 3.1's vocabulary, to measure speculation with random weights.
SHAPES["qwen3-0.6b-128k"] = {**SHAPES["qwen3-0.6b"], "vocab_size": 128256, "eos_token_id": 128001}


def config_alone(model: str) -> dict[str, Any]:
    """Return the config for random weights, from a shape's name, a folder with a config.json, or such a file."""
    if model in SHAPES:
        return SHAPES[model]
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    try:
        return read_json(file)
    except ModelError as error:
        raise ModelError(
            f"no config to make random weights from at {model!r} ({error}): give a folder with a config.json, "
            f"such a file, or one of {', '.join(SHAPES)}"
        ) from None
