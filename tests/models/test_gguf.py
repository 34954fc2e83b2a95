"""The GGUF reader: equal weights to the reference reader, and a clear error for every damaged file."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from gguf_models import finish

from chairlift.core.errors import ModelError
from chairlift.models.gguf import GgufFile
from chairlift.models.sources import DEFAULT_MODEL, resolve
from chairlift.ops.block_codes import CHUNK, dequantize
from chairlift.ops.block_formats import FORMATS, BlockFormat

QUANTIZED_BY_REFERENCE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(form: BlockFormat, count: int) -> np.ndarray:
    """Return blocks of random bits with finite scales, so that no weight is NaN."""
    rng = np.random.default_rng(form.nbytes)
    if form.plain is not None:
        return torch.randn(count, 1).to(getattr(torch, form.plain)).view(torch.uint8).numpy()
    blocks = rng.integers(0, 256, (count, form.nbytes), dtype=np.uint8)
    for start in SCALES_AT.get(form.name, (0,)):
        scales = rng.standard_normal((count, 1)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)
    return blocks


def same_bits(ours: torch.Tensor, reference: np.ndarray) -> bool:
    return np.array_equal(ours.numpy().view(np.uint32), reference.reshape(-1).view(np.uint32))


@pytest.mark.parametrize("number", FORMATS, ids=lambda number: FORMATS[number].name)
def test_any_block_unpacks_to_the_same_bits_as_the_reference(number: int) -> None:
    form = FORMATS[number]
    blocks = random_blocks(form, 3000)
    expected = quants.dequantize(blocks, GGMLQuantizationType(number))
    assert same_bits(dequantize(torch.from_numpy(blocks).view(-1), form, torch.float32), expected)


@pytest.mark.parametrize("name", QUANTIZED_BY_REFERENCE)
def test_weights_quantized_by_the_reference_are_read_exactly(name: str) -> None:
    kind = GGMLQuantizationType[name]
    weights = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    packed = quants.quantize(weights, kind)
    raw = torch.from_numpy(packed.view(np.uint8).reshape(-1))
    assert same_bits(dequantize(raw, FORMATS[kind.value], torch.float32), quants.dequantize(packed, kind))


def test_a_tensor_longer_than_a_chunk_is_seamless() -> None:
    form = FORMATS[GGMLQuantizationType.Q8_0.value]
    blocks = random_blocks(form, CHUNK // form.values + 5)
    expected = quants.dequantize(blocks, GGMLQuantizationType.Q8_0)
    assert same_bits(dequantize(torch.from_numpy(blocks).view(-1), form, torch.float32), expected)


def test_other_types_are_the_rounded_float32() -> None:
    form = FORMATS[GGMLQuantizationType.Q4_K.value]
    raw = torch.from_numpy(random_blocks(form, 50)).view(-1)
    exact = dequantize(raw, form, torch.float32)
    assert torch.equal(dequantize(raw, form, torch.bfloat16), exact.bfloat16())


def test_block_sizes_are_the_format_s() -> None:
    for number, form in FORMATS.items():
        kind = GGMLQuantizationType(number)
        assert (form.name, (form.values, form.nbytes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Write a file with every kind of metadata and a few kinds of tensors."""
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("a.uint8", 200)
    writer.add_int8("a.int8", -100)
    writer.add_uint16("a.uint16", 60000)
    writer.add_int16("a.int16", -30000)
    writer.add_int32("a.int32", -5)
    writer.add_uint64("a.uint64", 1 << 40)
    writer.add_int64("a.int64", -(1 << 40))
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "snow ❄")
    writer.add_array("a.strings", ["<s>", "Ġt", "日本", ""])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 0.25])
    rng = np.random.default_rng(0)
    writer.add_tensor("norm.weight", rng.standard_normal(32).astype(np.float32))
    writer.add_tensor("half.weight", rng.standard_normal((3, 5)).astype(np.float16))
    packed = quants.quantize(rng.standard_normal((4, 64)).astype(np.float32), GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.3.ffn_up.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
    finish(writer)
    return path


def test_metadata_of_every_type_is_read(small: Path) -> None:
    metadata = GgufFile(small).metadata
    assert metadata == {
        "general.architecture": "llama",
        "a.uint8": 200,
        "a.int8": -100,
        "a.uint16": 60000,
        "a.int16": -30000,
        "a.int32": -5,
        "a.uint64": 1 << 40,
        "a.int64": -(1 << 40),
        "a.float32": 0.5,
        "a.float64": 0.1,
        "a.bool": True,
        "a.string": "snow ❄",
        "a.strings": ["<s>", "Ġt", "日本", ""],
        "a.ints": [1, -2, 3],
        "a.floats": [0.5, 0.25],
    }


def test_tensors_are_read_as_the_reference_reads_them(small: Path) -> None:
    file = GgufFile(small)
    reference = {tensor.name: tensor for tensor in GGUFReader(small).tensors}
    assert list(file.tensors) == list(reference)
    for name, tensor in reference.items():
        assert file.tensors[name].shape == tuple(int(length) for length in reversed(tensor.shape))
        assert file.tensors[name].nbytes == tensor.n_bytes
        expected = quants.dequantize(tensor.data, tensor.tensor_type)
        assert same_bits(file.read(name).reshape(-1), np.ascontiguousarray(expected))


def test_unquantized_tensors_are_views_of_the_file_and_writes_to_them_stay_in_memory(small: Path) -> None:
    file = GgufFile(small)
    before = small.read_bytes()
    file.read("norm.weight")[0] = 7.0
    assert file.read("norm.weight")[0] == 7.0
    assert small.read_bytes() == before
    assert GgufFile(small).read("norm.weight")[0] != 7.0


def test_a_tensor_outlives_its_file(small: Path) -> None:
    weights = GgufFile(small).read("norm.weight")
    assert torch.isfinite(weights).all()


def test_version_2_is_read_too(small: Path) -> None:
    content = bytearray(small.read_bytes())
    content[4:8] = struct.pack("<I", 2)
    small.write_bytes(content)
    assert len(GgufFile(small).tensors) == 3


def test_a_file_cut_anywhere_is_a_model_error_of_one_line(small: Path) -> None:
    size = small.stat().st_size
    whole = GgufFile(small)
    end = max(tensor.offset + tensor.nbytes for tensor in whole.tensors.values())
    del whole
    with small.open("rb+") as file:
        for length in range(end - 1, -1, -1):
            file.truncate(length)
            with pytest.raises(ModelError) as caught:
                GgufFile(small)
            assert str(small) in str(caught.value)
            assert "\n" not in str(caught.value)
    assert size >= end


def test_a_cut_tensor_is_named_with_the_bytes_and_the_remedy(small: Path) -> None:
    tensor = GgufFile(small).tensors["blk.3.ffn_up.weight"]
    end = tensor.offset + tensor.nbytes
    small.write_bytes(small.read_bytes()[: end - 1])
    with pytest.raises(ModelError) as caught:
        GgufFile(small)
    assert str(caught.value) == (
        f"{small}: tensor blk.3.ffn_up.weight ends at byte {end} but the file has {end - 1}: "
        "the download is incomplete; delete it and fetch it again"
    )


def test_damaged_bytes_never_raise_anything_but_a_model_error(small: Path) -> None:
    content = small.read_bytes()
    header = GgufFile(small).tensors["norm.weight"].offset
    rng = random.Random(0)
    errors = 0
    for _ in range(1000):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(header)] = rng.choice((0, 1, 9, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        small.write_bytes(damaged)
        try:
            file = GgufFile(small)
            for name in file.tensors:
                file.read(name)
        except ModelError as error:
            assert "\n" not in str(error)
            errors += 1
    assert errors > 300  # most damage is detected; a changed digit in a value cannot be


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF version 3"),
    ],
)
def test_other_files_have_different_errors(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        GgufFile(path)


def test_a_missing_file_and_a_folder_are_model_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        GgufFile(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        GgufFile(tmp_path)


def test_the_error_of_an_unsupported_type_lists_the_supported_ones(tmp_path: Path) -> None:
    path = tmp_path / "iq.gguf"
    writer = GGUFWriter(path, "llama")
    packed = np.zeros((1, 136), dtype=np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=GGMLQuantizationType.IQ4_XS)
    finish(writer)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight has type IQ4_XS.*F32, F16, .*Q6_K"):
        GgufFile(path)


def test_a_tensor_that_is_not_there_is_named(small: Path) -> None:
    with pytest.raises(ModelError, match=r"no tensor output\.weight"):
        GgufFile(small).read("output.weight")


@pytest.mark.long
def test_the_default_model_reads_as_the_reference_reads_it() -> None:
    path = resolve(DEFAULT_MODEL)
    file = GgufFile(path)
    reader = GGUFReader(path)
    assert file.metadata["tokenizer.ggml.tokens"] == reader.fields["tokenizer.ggml.tokens"].contents()
    assert file.metadata["tokenizer.ggml.merges"] == reader.fields["tokenizer.ggml.merges"].contents()
    assert len(file.tensors) == len(reader.tensors) == 272
    wanted = ("blk.0.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight", "token_embd.weight")
    for tensor in reader.tensors:
        if tensor.name in wanted:
            expected = quants.dequantize(tensor.data, tensor.tensor_type)
            assert same_bits(file.read(tensor.name).view(-1), expected)
