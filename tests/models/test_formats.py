"""Quantized checkpoints: the numbers of each format, parts for ranks, answers, and errors that name the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import DENSE, FORMATS, write_quantized
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from chairlift.core.errors import ModelError, SettingsError
from chairlift.core.settings import ModelSettings, Settings
from chairlift.execution import build
from chairlift.execution.build import load_model
from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.cut import Cut
from chairlift.models.families import read_config, record
from chairlift.models.formats.on_load import KINDS, OnLoad, quantize
from chairlift.models.loader import Quantizing
from chairlift.ops.dense import Dense
from chairlift.ops.fp8 import Fp8
from chairlift.ops.grouped import Grouped
from mostly_long import mostly_long

CPU = torch.device("cpu")
Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
PROMPTS = [[5, 9, 200, 7], [3] * 20, list(range(40, 80))]
EACH = pytest.mark.parametrize("form", FORMATS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Write each format's models once."""
    written: dict[str, tuple[Path, Path]] = {}

    def get(form: str) -> tuple[Path, Path]:
        if form not in written:
            written[form] = write_quantized(tmp_path_factory.mktemp("model"), *FORMATS[form])
        return written[form]

    return get


def answers(folder: Path, **settings: Any) -> list[list[int]]:
    llm = LLM(str(folder), progress=False, device="cpu", max_length=128, **settings)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, greedy)]


@EACH
def test_numbers_and_answers_are_those_of_the_dense_model(form: str, folders: Any) -> None:
    quantized, plain = folders(form)
    checkpoint, dense = open_checkpoint(quantized), open_checkpoint(plain)
    for name in dense.names():
        assert checkpoint.shape(name) == dense.shape(name)
        assert torch.equal(checkpoint.tensor(name, torch.float32), dense.tensor(name, torch.float32)), name
    assert isinstance(checkpoint.weight(Q, torch.float32, CPU), Grouped)
    assert isinstance(checkpoint.weight(f"{DENSE}.weight", torch.float32, CPU), Dense), "it is stored dense"
    assert answers(quantized, dtype="float32") == answers(plain)


@pytest.mark.parametrize("form", mostly_long(FORMATS, 8))
def test_a_cpu_multiplies_integers_as_they_are(form: str, folders: Any) -> None:
    """Logits are near those of the numbers; the bytes that a step reads are the checkpoint's."""
    found = {}
    for dtype in ("auto", "float32"):
        llm = LLM(str(folders(form)[0]), progress=False, device="cpu", max_length=128, dtype=dtype)
        scored = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
        ids = [id for prompt in PROMPTS for id in prompt[1:]]
        entries = [entry for each in scored for entry in (each.prompt_logprobs or [])[1:]]
        logprobs = [entry[id].logprob for entry, id in zip(entries, ids, strict=True) if entry]
        found[dtype] = torch.tensor(logprobs), llm._built.weight_bytes, llm.weights
    (near, size, names), (exact, whole, _) = found["auto"], found["float32"]
    if "fp8" in form:
        assert torch.equal(near, exact) and names.startswith("float32 ")
        return
    kind = "fp4" if "fp4" in form else "int4" if "awq" in form or "4" in form else "int8"
    assert size < 0.6 * whole and f"{kind} " in names
    assert not torch.equal(near, exact) and (near - exact).norm() < 0.1 * (exact - exact.mean()).norm()


def test_an_answer_of_integer_products_does_not_depend_on_the_batch(folders: Any) -> None:
    llm = LLM(str(folders("w4a16 zeros")[0]), progress=False, device="cpu", max_length=128)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    together = llm.generate(PROMPTS, greedy)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        alone = llm.generate([prompt], greedy)[0].outputs[0]
        assert alone.token_ids == expected.outputs[0].token_ids
        assert alone.logprobs == expected.outputs[0].logprobs


@EACH
def test_ranks_read_parts_of_the_same_matrix(form: str, folders: Any) -> None:
    checkpoint = open_checkpoint(folders(form)[0])
    for name, cut in (
        (Q, Cut(0, ((32, 64),))),
        (Q, Cut(0, ((0, 8), (96, 112)))),
        (DOWN, Cut(1, ((128, 256),))),
        (Q, Cut(1, ((0, 64),))),
    ):
        whole, part = (checkpoint.weight(name, torch.float32, CPU, cut=each) for each in (None, cut))
        assert isinstance(whole, Grouped) and isinstance(part, Grouped)
        assert torch.equal(part.numbers(), cut.of(whole.numbers()))
        assert part.nbytes < whole.nbytes


@EACH
def test_sizes_before_loading_are_those_of_the_weights(form: str, folders: Any) -> None:
    checkpoint = open_checkpoint(folders(form)[0])
    given = checkpoint.config, "bfloat16"
    on_gpu = record(read_config(*given, "cuda", format=checkpoint.format)).nbytes
    names = [name for name in open_checkpoint(folders(form)[1]).names() if name != "lm_head.weight"]
    loaded = 0
    for name in names:
        is_matrix = name.endswith(("proj.weight", "embed_tokens.weight"))
        if is_matrix:
            loaded += checkpoint.weight(name, torch.bfloat16, CPU).nbytes
        else:
            loaded += checkpoint.tensor(name, torch.bfloat16).nbytes
    head = checkpoint.tensor("lm_head.weight", torch.bfloat16).nbytes if checkpoint.has("lm_head.weight") else 0
    assert on_gpu == loaded + head
    on_cpu = record(read_config(*given, "cpu", format=checkpoint.format)).nbytes
    assert on_cpu == record(read_config(*given, "cpu")).nbytes, "with a dtype, a CPU's matrices are dense"
    chosen = record(read_config(checkpoint.config, "auto", "cpu", format=checkpoint.format)).nbytes
    dense = record(read_config(checkpoint.config, "auto", "cpu")).nbytes
    assert (chosen == dense) if "fp8" in form else (chosen < 0.8 * dense)


def test_the_kind_of_weight_follows_the_scales(folders: Any) -> None:
    kinds = {
        form: type(open_checkpoint(folders(form)[0]).weight(Q, torch.bfloat16, CPU))
        for form in ("fp8 tensor", "w8a8 fp8", "fp8 blocks", "w4a16")
    }
    assert kinds == {"fp8 tensor": Fp8, "w8a8 fp8": Fp8, "fp8 blocks": Grouped, "w4a16": Grouped}


@pytest.mark.parametrize("form", ["w4a16 zeros", "awq", "gptq 8", "fp8 blocks"])
@pytest.mark.long
def test_two_ranks_answer_as_one(form: str, folders: Any) -> None:
    quantized, plain = folders(form)
    assert answers(quantized, tensor_parallel=2, dtype="float32") == answers(plain)
    if "fp8" not in form:
        assert answers(quantized, tensor_parallel=2) == answers(quantized)


# ---- what is refused


def changed(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Path:
    """Copy a model with its tensors and its config changed."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    to.mkdir(parents=True)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config))
    return to


PACKED, STEM = Q.replace(".weight", ".weight_packed"), Q.removesuffix(".weight")


@pytest.mark.parametrize(
    ("form", "name", "replace", "says"),
    [
        ("w4a16", f"{STEM}.weight_scale", lambda scale: scale * float("nan"), "not finite"),
        ("w4a16", f"{STEM}.weight_scale", lambda scale: scale[:, :2].contiguous(), r"shape \[128, 2\]"),
        ("w4a16", f"{STEM}.weight_packed", lambda words: words.to(torch.int64), "is int64, but int32"),
        ("w4a16", f"{STEM}.weight_packed", lambda words: words[:, 1:].contiguous(), r"shape \[128, 15\]"),
        ("w4a16 zeros", f"{STEM}.weight_zero_point", None, "no tensor"),
        ("gptq 4", f"{STEM}.g_idx", lambda order: order.flip(0), "act-order"),
        ("gptq 4", f"{STEM}.qzeros", lambda words: words[:, :3].contiguous(), r"shape \[4, 3\]"),
        ("gptq 4", f"{STEM}.scales", lambda scale: scale.double(), "is float64"),
        ("awq", f"{STEM}.scales", lambda scale: scale.fill_(float("inf")), "not finite"),
        ("awq", f"{STEM}.qzeros", None, "no tensor"),
        ("fp8 blocks", f"{STEM}.weight_scale_inv", lambda scale: scale[1:].contiguous(), r"shape \[3, 4\]"),
        ("fp8 tensor", f"{STEM}.weight_scale", lambda scale: scale.reshape(1, 1, 1), "shape"),
        ("fp8 tensor", f"{STEM}.weight_scale", None, "without scales"),
        ("mxfp4", f"{STEM}_scales", lambda scale: scale.fill_(255), "not finite"),
        ("mxfp4", f"{STEM}_scales", lambda scale: scale[:, :3].contiguous(), r"shape \[128, 3\]"),
        ("mxfp4", f"{STEM}_scales", lambda scale: scale.to(torch.int8), "is int8, but uint8"),
        ("mxfp4", f"{STEM}_blocks", lambda blocks: blocks[:, :, :8].contiguous(), r"shape \[128, 4, 8\]"),
        ("mxfp4 packed", f"{STEM}.weight_packed", lambda rows: rows[:, 1:].contiguous(), r"shape \[128, 63\]"),
        ("mxfp4 packed", f"{STEM}.weight_scale", None, "no tensor"),
        ("w8a8 int8", Q, lambda codes: codes.to(torch.int16), "is int16, but int8"),
    ],
)
def test_a_broken_tensor_is_named_in_one_line(
    form: str, name: str, replace: Any, says: str, folders: Any, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor], _config: dict[str, Any]) -> None:
        old = tensors.pop(name)
        if replace is not None:
            tensors[name] = replace(old.clone())

    broken = changed(folders(form)[0], tmp_path / "broken", change)
    with pytest.raises(ModelError, match=says) as raised:
        LLM(str(broken), progress=False, device="cpu", max_length=64)
    stem = name.rpartition(".")[0] if replace is not None else STEM
    assert stem in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("form", "change", "says"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, "'bitsandbytes' are not read: supported are awq"),
        ("mxfp4", {"quant_method": "quark"}, "'quark' are not read"),
        ("awq", {"version": "gemv"}, "only the gemm version"),
        ("awq", {"bits": 3}, "only AWQ of 4 bits"),
        ("gptq 4", {"bits": 2}, "4 and 8 bits"),
        ("gptq 4", {"group_size": 48}, "groups of 48"),
        ("gptq 4", {"checkpoint_format": "marlin"}, "gptq and gptq_v2"),
        ("w4a16", {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' is not read"),
        ("w4a16", {"config_groups": {}}, "one group"),
        ("fp8 blocks", {"weight_block_size": [128, 64]}, "square blocks"),
    ],
)
def test_a_format_that_is_not_read_is_refused_with_what_is(
    form: str, change: dict[str, Any], says: str, folders: Any, tmp_path: Path
) -> None:
    refused = changed(
        folders(form)[0], tmp_path / "refused", lambda _, config: config["quantization_config"].update(change)
    )
    with pytest.raises(ModelError, match=says):
        LLM(str(refused), progress=False, device="cpu", max_length=64)


def test_ranks_that_would_divide_a_group_are_refused_with_those_that_do_not(folders: Any) -> None:
    checkpoint = open_checkpoint(folders("w4a16 zeros")[0])  # groups of 64
    with pytest.raises(ModelError, match=r"in groups of 64 .* 0 to 32: set tensor_parallel to one of 1, 2, 4$"):
        checkpoint.weight(DOWN, torch.float32, CPU, cut=Cut(1, ((0, 32),)))


def test_the_memory_that_must_be_free_counts_embedding_and_head_as_they_are_kept(
    folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits: as float32 they would refuse a model that fits."""

    def change(tensors: dict[str, torch.Tensor], _config: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.bfloat16() if tensor.dtype == torch.float32 and "scale" not in name else tensor

    asked: list[int] = []
    folder = changed(folders("awq")[0], tmp_path / "model", change)
    monkeypatch.setattr(build, "require_memory", lambda _config, weights, *_rest: asked.append(weights))
    loaded = load_model(str(folder), Settings(model=ModelSettings(device="cpu")), progress=False)
    decoder = loaded.decoder
    kept = decoder.read_bytes + (0 if loaded.config.tied_embeddings else decoder.embedding.nbytes)
    assert 0.9 * kept < asked[0] < 1.1 * kept


def test_a_quantized_checkpoint_is_not_quantized_again(folders: Any) -> None:
    with pytest.raises(SettingsError, match="quantized already: leave it out"):
        LLM(str(folders("awq")[0]), progress=False, device="cpu", quantization="int8")


# ---- the packages' own tensors


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "strategy", "group"), [(4, "group", 32), (4, "channel", None), (8, "group", 64)])
def test_tensors_that_compressed_tensors_wrote_have_its_numbers(
    bits: int, strategy: str, group: int | None, symmetric: bool, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=group)
    theirs = QuantizationScheme(targets=["Linear"], weights=args)
    numbers = {}

    def write(name: str, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tiles = matrix.view(matrix.shape[0], -1, group or matrix.shape[1])
        scale, zero = calculate_qparams(tiles.amin(-1), tiles.amax(-1), args)
        state = {"weight": matrix, "weight_scale": scale, "weight_zero_point": zero}
        written = PackedQuantizationCompressor.compress(state, theirs)
        numbers[f"{name}.weight"] = PackedQuantizationCompressor.decompress(written, theirs)["weight"]
        return {f"{name}.{end}": tensor.contiguous() for end, tensor in written.items()}, matrix

    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": theirs.model_dump(mode="json")},
    }
    quantized, _ = write_quantized(tmp_path, config, write)
    checkpoint = open_checkpoint(quantized)
    for name, expected in numbers.items():
        assert torch.allclose(checkpoint.tensor(name, torch.float32), expected.float(), rtol=0, atol=1e-6)


def test_mxfp4_that_compressed_tensors_wrote_has_its_numbers(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    theirs: QuantizationScheme = preset_name_to_scheme("MXFP4A16", targets=["Linear"])
    numbers = {}

    def write(name: str, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tiles = matrix.view(matrix.shape[0], -1, 32)
        scale, zero = calculate_qparams(tiles.amin(-1), tiles.amax(-1), theirs.weights)
        state = {"weight": matrix, "weight_scale": scale, "weight_zero_point": zero}
        written = MXFP4PackedCompressor.compress(state, theirs)
        numbers[f"{name}.weight"] = MXFP4PackedCompressor.decompress(written, theirs)["weight"]
        return {f"{name}.{end}": tensor.contiguous() for end, tensor in written.items()}, matrix

    config = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": theirs.model_dump(mode="json")},
    }
    quantized, _ = write_quantized(tmp_path, config, write)
    checkpoint = open_checkpoint(quantized)
    for name, expected in numbers.items():
        assert torch.equal(checkpoint.tensor(name, torch.float32), expected.float())


# ---- rounding while loading


@pytest.mark.parametrize(("kind", "error"), [("fp8", 0.04), ("int8", 0.01), ("int4", 0.12)])
def test_rounding_while_loading_keeps_the_numbers_near(kind: str, error: float, folders: Any) -> None:
    checkpoint = open_checkpoint(folders("awq")[1])
    source = Quantizing(checkpoint, OnLoad(KINDS[kind]))
    for name in (Q, DOWN):
        exact, weight = checkpoint.tensor(name, torch.float32), source.weight(name, torch.float32, CPU)
        assert isinstance(weight, Grouped)
        assert (weight.numbers() - exact).square().mean().sqrt() / exact.square().mean().sqrt() < error
        outline = OnLoad(KINDS[kind]).outline(*weight.shape, torch.float32)
        assert (outline.nbytes, outline.shape) == (weight.nbytes, weight.shape)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert isinstance(source.weight(name, torch.float32, CPU), Dense)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_model_rounded_while_loading_answers_as_its_numbers_do(kind: str, folders: Any, tmp_path: Path) -> None:
    plain = folders("awq")[1]
    source = Quantizing(open_checkpoint(plain), OnLoad(KINDS[kind]))

    def change(tensors: dict[str, torch.Tensor], _config: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith("proj.weight"):
                weight = source.weight(name, torch.float32, CPU)
                assert isinstance(weight, Grouped)
                tensors[name] = weight.numbers()

    exact = answers(changed(plain, tmp_path / "rounded", change))
    assert answers(plain, quantization=kind, dtype="float32") == exact
    llm = LLM(str(plain), progress=False, device="cpu", max_length=128, quantization=kind)
    assert llm.weights.count("float32" if kind == "fp8" else kind) == 1


def test_a_row_of_zeros_stays_zeros() -> None:
    matrix = torch.zeros(4, 64)
    for code in KINDS.values():
        weight = quantize(matrix, code)
        assert isinstance(weight, Grouped) and not weight.numbers().any()
