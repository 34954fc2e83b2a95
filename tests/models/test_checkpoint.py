"""Checkpoints: one interface over safetensors folders and GGUF files, and clear errors for broken ones."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from chairlift.core.errors import ModelError
from chairlift.models.checkpoint import Checkpoint, open_checkpoint

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}


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
