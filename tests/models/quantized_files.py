"""Tiny models in the formats of quantized checkpoints, packed here from the formats' published descriptions.

Each is written beside a dense model that has the same numbers. The packing is plain loops on purpose, and shares
nothing with the code under test.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tiny import make_tiny_model

Tensors = dict[str, torch.Tensor]
Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]  # of a matrix: its tensors, and its numbers


def words_of(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack codes [rows, columns] along the columns in int32 words; `places` is the order of a word's columns."""
    each = 32 // bits
    order = places or tuple(range(each))
    padded = np.zeros((codes.shape[0], -(-codes.shape[1] // each) * each), np.uint64)
    padded[:, : codes.shape[1]] = codes
    words = np.zeros((codes.shape[0], padded.shape[1] // each), np.uint64)
    for word in range(words.shape[1]):
        for i in range(each):
            words[:, word] |= padded[:, word * each + order[i]] << np.uint64(bits * i)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def rounded(matrix: torch.Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return unsigned codes [out, in], scales and zeros [out, groups] as NumPy and torch, and the numbers."""
    wide = matrix.float().view(matrix.shape[0], -1, group)
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    if symmetric:
        scales = (wide.abs().amax(-1) / (middle - 1)).to(dtype)
        zeros = torch.full(scales.shape, middle)
    else:
        scales = ((wide.amax(-1) - wide.amin(-1)) / most).to(dtype)
        zeros = (-wide.amin(-1) / scales.float()).round().clamp(1, most).long()
    codes = (wide / scales.float().unsqueeze(-1)).round().long() + zeros.unsqueeze(-1)
    codes = codes.clamp(0, most)
    numbers = ((codes - zeros.unsqueeze(-1)).float() * scales.float().unsqueeze(-1)).flatten(1)
    return codes.flatten(1).numpy(), scales, zeros.numpy(), numbers


def awq(group: int) -> Writer:
    def write(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, numbers = rounded(matrix, 4, group, False, torch.float16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            f"{name}.qweight": words_of(codes.T, 4, order),
            f"{name}.qzeros": words_of(zeros.T, 4, order),
            f"{name}.scales": scales.t().contiguous(),
        }, numbers

    return write


def gptq(bits: int, group: int, symmetric: bool, less: int = 1) -> Writer:
    def write(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, numbers = rounded(
            matrix, bits, group if group > 0 else matrix.shape[1], symmetric, torch.float16
        )
        return {
            f"{name}.qweight": words_of(codes, bits).t().contiguous(),
            f"{name}.qzeros": words_of(zeros.T - less, bits),
            f"{name}.scales": scales.t().contiguous(),
            f"{name}.g_idx": torch.arange(matrix.shape[1], dtype=torch.int32)
            // (group if group > 0 else matrix.shape[1]),
        }, numbers

    return write


def packed(bits: int, group: int, symmetric: bool) -> Writer:
    def write(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = group if group > 0 else matrix.shape[1]
        codes, scales, zeros, numbers = rounded(matrix, bits, size, symmetric, torch.bfloat16)
        made = {
            f"{name}.weight_packed": words_of(codes, bits),
            f"{name}.weight_scale": scales,
            f"{name}.weight_shape": torch.tensor(matrix.shape),
        }
        if not symmetric:
            made[f"{name}.weight_zero_point"] = words_of(zeros.T, bits).t().contiguous()
        return made, numbers

    return write


def int8(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, _, numbers = rounded(matrix, 8, matrix.shape[1], True, torch.bfloat16)
    return {
        f"{name}.weight": torch.from_numpy((codes - 128).astype(np.int8)),
        f"{name}.weight_scale": scales,
    }, numbers


def fp8(kind: str, scale_name: str) -> Writer:
    def write(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = int(kind) if kind.isdigit() else 0
        if kind == "tensor":
            scales = matrix.abs().amax() / 448
            spread = scales.expand_as(matrix)
        elif kind == "channel":
            scales = matrix.abs().amax(1, keepdim=True) / 448
            spread = scales.expand_as(matrix)
        else:
            tiles = matrix.view(matrix.shape[0] // size, size, -1, size)
            scales = tiles.abs().amax((1, 3)) / 448
            spread = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)
        codes = (matrix / spread).to(torch.float8_e4m3fn)
        return {f"{name}.weight": codes, f"{name}.{scale_name}": scales.float()}, codes.float() * spread

    return write


def mxfp4(blocked: bool) -> Writer:
    """Choose each block's power as the format's publication does; `blocked` is gpt-oss's way to store it."""

    def write(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        steps = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        blocks = matrix.double().numpy().reshape(matrix.shape[0], -1, 32)
        powers = np.floor(np.log2(np.abs(blocks).max(-1))) - 2
        scaled = blocks / 2.0 ** powers[..., None]
        sizes = np.abs(np.abs(scaled)[..., None] - steps).argmin(-1)
        numbers = np.where(scaled < 0, -1, 1) * steps[sizes] * 2.0 ** powers[..., None]
        codes = (sizes + 8 * (scaled < 0)).astype(np.uint8)
        pairs = torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4)
        scales = torch.from_numpy((powers + 127).astype(np.uint8))
        made = {f"{name}.weight_packed": pairs.flatten(1), f"{name}.weight_scale": scales}
        if blocked:
            made = {f"{name}_blocks": pairs, f"{name}_scales": scales}
        return made, torch.from_numpy(numbers.reshape(matrix.shape)).float()

    return write


def scheme(form: str, **weights: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


DENSE = "model.layers.1.mlp.down_proj"  # on the ignore list of every checkpoint written here
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq(32)),
    "awq 64": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}, awq(64)),
    "gptq 4": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, gptq(4, 32, True)),
    "gptq 4 zeros": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False},
        gptq(4, 64, False),
    ),
    "gptq 4 v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(4, 32, False, less=0),
    ),
    "gptq 8": ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, gptq(8, -1, True)),
    "gptq 8 zeros": ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False}, gptq(8, 32, False)),
    "w4a16": (scheme("pack-quantized", num_bits=4, strategy="group", group_size=32), packed(4, 32, True)),
    "w4a16 zeros": (
        scheme("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False),
        packed(4, 64, False),
    ),
    "w4a16 channel": (scheme("pack-quantized", num_bits=4, strategy="channel"), packed(4, -1, True)),
    "w8a16": (scheme("pack-quantized", num_bits=8, strategy="group", group_size=32), packed(8, 32, True)),
    "w8a16 zeros": (
        scheme("pack-quantized", num_bits=8, strategy="channel", symmetric=False),
        packed(8, -1, False),
    ),
    "w8a8 int8": (scheme("int-quantized", num_bits=8, strategy="channel"), int8),
    "w8a8 fp8": (
        scheme("float-quantized", num_bits=8, type="float", strategy="channel"),
        fp8("channel", "weight_scale"),
    ),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": [DENSE]}, mxfp4(True)),
    "mxfp4 packed": (
        scheme("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        mxfp4(False),
    ),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8("tensor", "weight_scale")),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        fp8("32", "weight_scale_inv"),
    ),
}


@functools.cache
def _tiny() -> tuple[Tensors, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        made = make_tiny_model(
            Path(folder), hidden_size=128, intermediate_size=256, head_dim=32, seed=3, tokenizer=False
        )
        tensors = {name: tensor.clone() for name, tensor in load_file(made / "model.safetensors").items()}
        return tensors, json.loads((made / "config.json").read_text())


def tiny_tensors() -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and the config of a tiny model."""
    tensors, config = _tiny()
    return dict(tensors), dict(config)


def write_quantized(folder: Path, config: dict[str, Any], writer: Writer) -> tuple[Path, Path]:
    """Write a tiny model in a format, and the dense model of the same numbers."""
    plain = folder / "plain"
    plain.mkdir()
    made: Tensors = {}
    dense, described = tiny_tensors()
    (plain / "config.json").write_text(json.dumps(described))
    for name, tensor in dict(dense).items():
        stem = name.removesuffix(".weight")
        if ".layers." not in name or not name.endswith("proj.weight") or stem == DENSE:
            made[name] = tensor
            continue
        tensors, numbers = writer(stem, tensor)
        made |= tensors
        dense[name] = numbers.contiguous()
    target = folder / "quantized"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    save_file(made, target / "model.safetensors")
    save_file(dense, plain / "model.safetensors")
    return target, plain
