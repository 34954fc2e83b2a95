"""Damaged copies of model files, as after an incomplete download, a careless edit or an attack."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf import GGUFValueType
from gguf_models import finish
from safetensors.torch import load_file, save_file

from chairlift.models.gguf_config import GLOBAL_NAMES, LAYER_NAMES
from spoil import HUGE, spoil_bytes, spoil_json
from tiny import CHAT_TEMPLATE, make_tiny_model

SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
# Values of a GGUF file by type.
ODD_METADATA: dict[GGUFValueType, tuple[Any, ...]] = {
    GGUFValueType.UINT8: (0, 1, 255),
    GGUFValueType.INT8: (-128, -1, 0),
    GGUFValueType.UINT32: (0, 1, 3, 7, 50_000_000, 2**32 - 1),
    GGUFValueType.INT32: (-(2**31), -1, 0, 2**31 - 1),
    GGUFValueType.UINT64: (0, 2**40, 2**63, 2**64 - 1),
    GGUFValueType.INT64: (-(2**63), -1, 2**63 - 1),
    GGUFValueType.FLOAT32: (0.0, -1.0, 1e-38, 3e38, float("nan"), float("inf"), 0.5),
    GGUFValueType.FLOAT64: (0.0, 1e300, float("nan"), -float("inf")),
    GGUFValueType.BOOL: (True, False),
    GGUFValueType.STRING: ("", "x", "1", "a\nb", "\x00", "x" * 5000, "❄", "yarn", "linear", "gpt2", "{{ 1 / 0 }}"),
}
Files = dict[str, bytes]
Metadata = dict[str, tuple[GGUFValueType, Any]]


def spoil_count(rng: random.Random, content: bytes) -> bytes:
    """Replace a number near the start that may be a length or a count with a huge one."""
    front = range(min(len(content), 4000) - 8)
    places = [at for at in front if 0 < int.from_bytes(content[at : at + 8], "little") < 2000]
    damaged = bytearray(content)
    at = rng.choice(places or [0])
    damaged[at : at + 8] = struct.pack("<Q", rng.choice(HUGE))
    return bytes(damaged)


def spoil_safetensors(rng: random.Random, content: bytes) -> bytes:
    """Damage the bytes, or the header's description of the tensors."""
    if rng.random() < 0.4:
        return rng.choice((spoil_bytes, spoil_count))(rng, content)
    start = 8 + int.from_bytes(content[:8], "little")
    header = spoil_json(rng, content[8:start])
    return struct.pack("<Q", len(header)) + header + content[start:]


def spoil_folder(rng: random.Random, files: Files) -> Files:
    """Damage one file of a model folder, or remove it."""
    name = rng.choice(sorted(files))
    if rng.random() < 0.02:
        return {other: content for other, content in files.items() if other != name}
    spoil: Callable[[random.Random, bytes], bytes] = spoil_bytes
    if name.endswith(".json"):
        spoil = spoil_json
    elif name.endswith(".safetensors"):
        spoil = spoil_safetensors
    return {**files, name: spoil(rng, files[name])}


def spoil_metadata(rng: random.Random, metadata: Metadata) -> Metadata:
    """Give one key of a GGUF file's metadata another type or value, or remove it."""
    changed, key = dict(metadata), rng.choice(list(metadata))
    if rng.random() < 0.05:
        del changed[key]
        return changed
    kind = rng.choice(list(ODD_METADATA))
    value = rng.choice(ODD_METADATA[kind])
    old_kind, old = metadata[key]
    if isinstance(old, list) and rng.random() < 0.6:  # one entry, or the length
        if rng.random() < 0.5:
            value = old[: rng.randrange(1, len(old))]
        else:
            value = [*old]
            value[rng.randrange(len(old))] = rng.choice(ODD_METADATA[old_kind])
        kind = old_kind
    elif rng.random() < 0.2:
        value = [value] * rng.choice((1, 2, 40))
    changed[key] = (kind, value)
    return changed


def write_gguf(path: Path, metadata: Metadata, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write a GGUF file with metadata of any type."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, (kind, value) in metadata.items():
        if isinstance(value, list):
            writer.add_key_value(key, value, GGUFValueType.ARRAY, kind)
        else:
            writer.add_key_value(key, value, kind)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)


def model_folders(scratch: Path) -> list[Files]:
    """Write small valid model folders that together have every key that is read."""
    source = make_tiny_model(scratch / "source", **SIZES)
    weights = load_file(source / "model.safetensors")
    files = {name: (source / name).read_bytes() for name in ("config.json", "generation_config.json", "tokenizer.json")}
    described = json.loads((source / "tokenizer_config.json").read_text())
    named = {"bos_token": described["bos_token"], "eos_token": {"content": described["eos_token"], "special": True}}
    template = described.pop("chat_template")
    config = json.loads(files["config.json"])
    scalings = (
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 128},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
        | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True},
    )
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}
    generation = {"eos_token_id": [1, 5], "max_new_tokens": 64, **sampling}
    shards = _shards(scratch, weights)
    more: list[Files] = [
        {
            "config.json": _json(config | {"rope_parameters": scalings[0]}),
            "tokenizer_config.json": _json(described | {"chat_template": template}),
        },
        {
            "config.json": _json(config | {"rope_parameters": scalings[1]}),
            "chat_template.jinja": template.encode(),
            "tokenizer_config.json": _json(
                {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>", "add_bos_token": True}
                | {"added_tokens_decoder": {"0": {"content": "<|begin|>", "special": True, "normalized": False}}}
                | {"extra_special_tokens": ["<|tool|>"], "additional_special_tokens": [{"content": "<|end|>"}]}
            ),
        },
        {
            "config.json": _json(
                {**config, "architectures": ["MistralForCausalLM"], "sliding_window": 16, "torch_dtype": "float32"}
                | {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 10000}
            ),
            "special_tokens_map.json": _json(named),
            "tokenizer_config.json": _json({"chat_template": [{"name": "default", "template": CHAT_TEMPLATE}]}),
            "chat_template.json": _json({"chat_template": CHAT_TEMPLATE}),
        },
    ]
    one = {"model.safetensors": (source / "model.safetensors").read_bytes()}
    weights_of = (one, shards, shards)
    return [
        {**files, "generation_config.json": _json(generation), **each, **stored}
        for each, stored in zip(more, weights_of, strict=True)
    ]


def gguf_models(scratch: Path) -> list[tuple[Metadata, dict[str, np.ndarray[Any, Any]]]]:
    """Return metadata and tensors of small valid GGUF files, with a byte-level and a SentencePiece vocabulary."""
    source = make_tiny_model(scratch / "gguf", **SIZES)
    backend = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    tokens = sorted(backend.get_vocab(), key=backend.token_to_id)
    merges = [" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
    text, count, real = GGUFValueType.STRING, GGUFValueType.UINT32, GGUFValueType.FLOAT32
    shared: Metadata = {
        "general.architecture": (text, "llama"),
        "general.name": (text, "Tiny"),
        "general.alignment": (count, 32),
        "general.sampling.temp": (real, 0.5),
        "general.sampling.top_k": (GGUFValueType.INT32, 10),
        "split.count": (GGUFValueType.UINT16, 1),
        "llama.block_count": (count, 1),
        "llama.context_length": (count, 512),
        "llama.embedding_length": (count, 32),
        "llama.feed_forward_length": (count, 48),
        "llama.attention.head_count": (count, 4),
        "llama.attention.head_count_kv": (count, 2),
        "llama.attention.key_length": (count, 8),
        "llama.attention.layer_norm_rms_epsilon": (real, 1e-5),
        "llama.rope.freq_base": (real, 10000.0),
        "llama.rope.dimension_count": (count, 8),
        "tokenizer.chat_template": (text, CHAT_TEMPLATE),
        "tokenizer.ggml.tokens": (text, tokens),
        "tokenizer.ggml.token_type": (GGUFValueType.INT32, [3, 3, *[1] * (len(tokens) - 2)]),
        "tokenizer.ggml.bos_token_id": (count, 0),
        "tokenizer.ggml.eos_token_id": (count, 1),
        "tokenizer.ggml.padding_token_id": (count, 1),
        "tokenizer.ggml.add_bos_token": (GGUFValueType.BOOL, True),
    }
    byte_level: Metadata = {
        "tokenizer.ggml.model": (text, "gpt2"),
        "tokenizer.ggml.pre": (text, "smollm"),
        "tokenizer.ggml.merges": (text, merges),
        "tokenizer.ggml.eot_token_id": (count, 1),
        "llama.rope.scaling.type": (text, "yarn"),
        "llama.rope.scaling.factor": (real, 4.0),
        "llama.rope.scaling.original_context_length": (count, 128),
        "llama.rope.scaling.yarn_beta_fast": (real, 32.0),
    }
    sentencepiece: Metadata = {
        "tokenizer.ggml.model": (text, "llama"),
        "tokenizer.ggml.scores": (real, [-float(id) for id in range(len(tokens))]),
        "tokenizer.ggml.add_space_prefix": (GGUFValueType.BOOL, True),
        "llama.attention.sliding_window": (count, 16),
        "llama.rope.scale_linear": (real, 2.0),
    }
    tensors = _gguf_tensors(load_file(source / "model.safetensors"))
    factors = {"rope_freqs.weight": np.ones(4, np.float32)}
    return [({**shared, **byte_level}, tensors), ({**shared, **sentencepiece}, tensors | factors)]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _shards(scratch: Path, weights: dict[str, torch.Tensor]) -> Files:
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    files: Files = {}
    for file, held in halves.items():
        save_file({name: weights[name] for name in held}, scratch / file)
        files[file] = (scratch / file).read_bytes()
    weight_map = {name: file for file, held in halves.items() for name in held}
    files["model.safetensors.index.json"] = _json({"metadata": {"total_size": 1}, "weight_map": weight_map})
    return files


def _gguf_tensors(weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors by GGUF's names; the order of rows does not matter here."""
    names = {hf: ours for ours, hf in GLOBAL_NAMES.items()}
    names |= {f"model.layers.0.{hf}.weight": f"blk.0.{ours}.weight" for ours, hf in LAYER_NAMES.items()}
    return {names[name]: values.numpy() for name, values in weights.items()}
