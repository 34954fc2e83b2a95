"""Checkpoints: one interface over safetensors folders and GGUF files, and clear errors for broken ones."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

from chairlift.core.errors import ModelError
from chairlift.models.checkpoint import Checkpoint, GgufCheckpoint, SafetensorsCheckpoint, open_checkpoint
from chairlift.models.gguf_config import hf_name

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY = 32, 4, 2, 8, 48, 40


def model_folder(folder: Path, *shards: tuple[str, dict[str, torch.Tensor]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in shards:
        save_file(tensors, folder / name)
    return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.randn(4).bfloat16(), "c": torch.ones(3, dtype=torch.int8)}
    return model_folder(tmp_path / "model", ("model.safetensors", tensors))


def test_a_folder_has_its_config_and_its_tensors_as_stored(folder: Path) -> None:
    checkpoint: Checkpoint = open_checkpoint(folder)
    assert checkpoint.path == folder
    assert checkpoint.config == CONFIG
    assert sorted(checkpoint.names()) == ["a", "b", "c"]
    assert checkpoint.nbytes() == 6 * 4 + 4 * 2 + 3
    assert torch.equal(checkpoint.tensor("a"), torch.arange(6.0).view(2, 3))
    assert checkpoint.tensor("b").dtype == torch.bfloat16
    assert checkpoint.tensor("c").dtype == torch.int8


def test_a_cast_is_a_copy_and_the_stored_type_a_view(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensor("a").data_ptr() == checkpoint.tensor("a", torch.float32).data_ptr()
    assert torch.equal(checkpoint.tensor("a", torch.float16), torch.arange(6.0).view(2, 3).half())


def test_every_stored_type_and_shape_is_what_safetensors_wrote(tmp_path: Path) -> None:
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
    tensors = {str(kind): torch.arange(10).to(kind).view(2, 5) for kind in (*kinds, torch.float8_e4m3fn, torch.bool)}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
    checkpoint = open_checkpoint(model_folder(tmp_path / "m", ("model.safetensors", tensors)))
    for name, expected in tensors.items():
        read = checkpoint.tensor(name)
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
        assert torch.equal(read.float(), expected.float())


def test_an_unaligned_tensor_is_read_all_the_same(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    values = torch.arange(3.0)
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]}}).encode()
    content = struct.pack("<Q", len(header)) + header + b"\0" + values.numpy().tobytes()
    (folder / "model.safetensors").write_bytes(content)
    assert torch.equal(open_checkpoint(folder).tensor("x"), values)


def test_generation_config_is_carried_along(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(folder).config["generation_config"] == {"eos_token_id": [1, 2]}


def test_shards_by_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    folder = model_folder(tmp_path / "m", (one, {"a": torch.ones(2)}), (two, {"b": torch.zeros(2)}))
    save_file({"a": torch.ones(2)}, folder / "consolidated.safetensors")  # not in the index, so not part of the model
    write_index(folder, {"a": one, "b": two})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.names() == ["a", "b"]
    assert torch.equal(checkpoint.tensor("b"), torch.zeros(2))


def test_shards_without_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    folder = model_folder(
        tmp_path / "m", ("x-1.safetensors", {"a": torch.ones(2)}), ("x-2.safetensors", {"b": torch.ones(2)})
    )
    assert open_checkpoint(folder).names() == ["a", "b"]


def test_a_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    folder = model_folder(
        tmp_path / "m", ("x-1.safetensors", {"a": torch.ones(2)}), ("x-2.safetensors", {"a": torch.ones(2)})
    )
    with pytest.raises(ModelError, match="both hold tensor a"):
        open_checkpoint(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", ("one.safetensors", {"a": torch.ones(2)}))
    write_index(folder, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(ModelError, match=r"lacks two\.safetensors \(1 of the 2 files"):
        open_checkpoint(folder)


def test_a_tensor_of_the_index_that_no_shard_has_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", ("one.safetensors", {"a": torch.ones(2)}))
    write_index(folder, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(ModelError, match=r"one\.safetensors holds tensor b, but it does not"):
        open_checkpoint(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no tensor lm_head\.weight \(it has 3: "):
        open_checkpoint(folder).tensor("lm_head.weight")


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text("{'hidden_size': 8}")


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def binary_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def empty_index(folder: Path) -> None:
    write_index(folder, {})


def lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (remove_config, r"has no config\.json"),
        (spoil_config, r"config\.json is not JSON"),
        (list_config, r"config\.json is not a JSON object"),
        (binary_config, r"config\.json is not JSON"),
        (remove_weights, "holds no weights: expected"),
        (only_pickles, r"pytorch_model\.bin, a pickle.*only safetensors and GGUF"),
        (empty_index, "has no weight_map"),
        (lfs_pointer, "git lfs pull"),
    ],
)
def test_a_broken_folder_is_a_one_line_error(folder: Path, break_it: Callable[[Path], None], message: str) -> None:
    break_it(folder)
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_safetensors_cut_anywhere_are_a_model_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    with path.open("rb+") as file:
        for length in range(path.stat().st_size - 1, -1, -1):
            file.truncate(length)
            with pytest.raises(ModelError) as caught:
                open_checkpoint(folder)
            assert "\n" not in str(caught.value)


def test_damaged_safetensors_never_raise_anything_but_a_model_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    rng = random.Random(0)
    for _ in range(1000):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(content))] = rng.choice(b'0123456789[]{},:"\x00\xff')
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(folder)
            for name in checkpoint.names():
                checkpoint.tensor(name)
        except ModelError as error:
            assert "\n" not in str(error)


def test_paths_that_are_not_models_have_different_errors(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(ModelError, match="name its folder"):
        open_checkpoint(folder / "model.safetensors")
    with pytest.raises(ModelError, match="not a GGUF file"):
        open_checkpoint(folder / "config.json")


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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
