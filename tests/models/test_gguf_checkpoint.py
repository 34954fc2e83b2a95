"""GGUF files as checkpoints: config and rows as Hugging Face has them, and clear errors."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf_models import (
    FEED_FORWARD,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCABULARY,
    as_llama_converters_do,
    hf_tensors,
    write_gguf,
)
from safetensors.torch import save_file

from chairlift.core.errors import ModelError
from chairlift.models.checkpoint import GgufCheckpoint, SafetensorsCheckpoint, open_checkpoint
from chairlift.models.gguf_config import hf_name


def test_a_llama_gguf_offers_hugging_face_s_config(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", hf_tensors())
    config = open_checkpoint(path).config
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected
    assert "rope_freq_factors" not in config


@pytest.mark.parametrize("bias", [False, True])
def test_the_reordered_rows_of_a_llama_gguf_are_restored(tmp_path: Path, bias: bool) -> None:
    original = hf_tensors(bias=bias)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", as_llama_converters_do(original)))
    assert checkpoint.config["attention_bias"] == bias
    assert sorted(checkpoint.names()) == sorted(map(hf_name, original))
    for name, values in original.items():
        assert torch.equal(checkpoint.tensor(hf_name(name)), torch.from_numpy(values)), name


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_ggufs_keep_their_rows(tmp_path: Path, arch: str) -> None:
    original = hf_tensors(bias=arch == "qwen2", head_norms=arch == "qwen3")
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", arch, original))
    assert checkpoint.config["architectures"] == [f"{arch.capitalize()}ForCausalLM"]
    assert not checkpoint.config["attention_bias"]  # it would mean a bias of the output projection too
    for name, values in original.items():
        assert torch.equal(checkpoint.tensor(hf_name(name)), torch.from_numpy(values)), name


def rotate_halves(vector: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = vector.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def rotate_neighbours(vector: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = vector[..., 0::2], vector[..., 1::2]
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.stack(turned, -1).flatten(-2)


def test_attention_scores_of_the_file_s_rows_and_of_ours_agree(tmp_path: Path) -> None:
    """The reason for the row order: neighbours rotated in the file are halves rotated in the model."""
    stored = {name: torch.from_numpy(values) for name, values in hf_tensors().items()}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", hf_tensors()))
    x, angles = torch.randn(HIDDEN), torch.rand(HEAD_DIM // 2)

    def score(q: torch.Tensor, k: torch.Tensor, rotate: Callable[..., torch.Tensor]) -> torch.Tensor:
        queries, keys = (q @ x).view(KV_HEADS, -1, HEAD_DIM), (k @ x).view(KV_HEADS, 1, HEAD_DIM)
        return (rotate(queries, 5 * angles) * rotate(keys, 2 * angles)).sum(-1)

    ours = (checkpoint.tensor(f"model.layers.0.self_attn.{which}_proj.weight") for which in "qk")
    torch.testing.assert_close(
        score(*ours, rotate_halves),
        score(stored["blk.0.attn_q.weight"], stored["blk.0.attn_k.weight"], rotate_neighbours),
    )


def test_head_size_and_output_weights_are_taken_from_the_file(tmp_path: Path) -> None:
    tensors = hf_tensors(head_norms=True) | {"output.weight": np.zeros((VOCABULARY, HIDDEN), np.float32)}
    for which, heads in (("q", HEADS), ("k", KV_HEADS)):
        tensors[f"blk.0.attn_{which}.weight"] = np.zeros((heads * 16, HIDDEN), np.float32)
    config = open_checkpoint(
        write_gguf(tmp_path / "m.gguf", "qwen3", tensors, lambda writer: writer.add_key_length(16))
    ).config
    assert config["head_dim"] == 16
    assert not config["tie_word_embeddings"]


def test_a_llama_gguf_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", hf_tensors(), lambda writer: writer.add_sliding_window(64))
    config = open_checkpoint(path).config
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 64


def test_llama_3_s_frequency_factors_are_config_and_not_weights(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.5, 8.0, 32.0], dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", hf_tensors() | {"rope_freqs.weight": factors})
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["rope_freq_factors"] == [1.0, 1.5, 8.0, 32.0]
    assert len(checkpoint.names()) == len(hf_tensors())


def add_rope_scaling(writer: GGUFWriter, kind: str) -> None:
    writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def test_rope_scaling_is_converted_to_hugging_face_s_format(tmp_path: Path) -> None:
    def scaling(kind: str) -> Any:
        path = tmp_path / f"{kind}.gguf"
        write_gguf(path, "qwen2", hf_tensors(bias=True), lambda writer: add_rope_scaling(writer, kind))
        return open_checkpoint(path).config["rope_scaling"]

    assert scaling("none") is None
    assert scaling("linear") == {"rope_type": "linear", "factor": 4.0}
    assert scaling("yarn") == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    with pytest.raises(ModelError, match="rope scaling 'longrope' is not supported"):
        scaling("longrope")


def test_a_model_with_several_end_tokens_has_a_list_of_them(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", hf_tensors(), lambda writer: writer.add_eot_token_id(9))
    assert open_checkpoint(path).config["eos_token_id"] == [2, 9]


def test_a_vocabulary_is_read_when_it_is_asked_for_and_not_kept(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_token_list(["a", "b"])
        writer.add_name("small")

    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", hf_tensors(), add))
    assert isinstance(checkpoint, GgufCheckpoint)
    assert checkpoint.metadata["general.name"] == "small" and "tokenizer.ggml.tokens" not in checkpoint.metadata
    assert checkpoint.read_metadata() == checkpoint.metadata | {"tokenizer.ggml.tokens": ["a", "b"]}


def test_a_folder_with_one_gguf_is_that_model_and_with_several_an_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", hf_tensors())
    assert isinstance(open_checkpoint(tmp_path), GgufCheckpoint)
    write_gguf(tmp_path / "n.gguf", "llama", hf_tensors())
    with pytest.raises(ModelError, match=r"several GGUF files; name one: m\.gguf, n\.gguf"):
        open_checkpoint(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)


def without(name: str) -> dict[str, np.ndarray]:
    return {key: values for key, values in hf_tensors().items() if key != name}


@pytest.mark.parametrize(
    ("arch", "tensors", "more", "message"),
    [
        ("gemma3", hf_tensors(), lambda w: None, "architecture 'gemma3' is not supported; supported are llama"),
        ("llama", without("token_embd.weight"), lambda w: None, r"no tensor token_embd\.weight"),
        ("llama", hf_tensors(), lambda w: w.add_expert_count(8), "mixture of experts"),
        ("llama", hf_tensors(), lambda w: w.add_uint16("split.count", 2), "one of 2 parts"),
        ("llama", hf_tensors(), lambda w: w.add_rope_dimension_count(4), "rotates 4 of 8 dimensions"),
        ("llama", hf_tensors(), lambda w: w.add_key_length(16), "32 rows, but 4 heads of 16 are 64|rotates"),
        ("llama", hf_tensors() | {"blk.0.odd.weight": np.zeros(4, np.float32)}, lambda w: None, "blk.0.odd.weight"),
    ],
)
def test_the_error_of_an_unsupported_gguf_says_why(
    tmp_path: Path, arch: str, tensors: dict[str, np.ndarray], more: Callable[[GGUFWriter], object], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch, tensors, more)
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_damaged_gguf_model_never_raises_anything_but_a_model_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", hf_tensors())
    content = path.read_bytes()
    header = content.index(b"output_norm.weight")
    rng = random.Random(1)
    for _ in range(1000):
        damaged = bytearray(content)
        damaged[rng.randrange(header)] = rng.choice((0, 1, 4, 8, 9, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(path)
            for name in checkpoint.names():
                checkpoint.tensor(name)
        except ModelError as error:
            assert "\n" not in str(error)
