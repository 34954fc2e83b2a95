"""One file per family, which builds embedding, blocks and head from a config and its tensors.

A family reads its own config values here, so that no other package depends on a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from chairlift.core.errors import ModelError, SettingsError
from chairlift.core.values import Values, show
from chairlift.models.building import RecordingTake, Take
from chairlift.models.config import ModelConfig, read_common
from chairlift.models.decoder import Decoder
from chairlift.models.families.gemma import Gemma
from chairlift.models.families.llama import Llama, qwen_windows, same_window
from chairlift.models.families.phi3 import build as build_phi3
from chairlift.models.formats.format import Format
from chairlift.models.formats.on_load import KINDS, OnLoad

FAMILIES: dict[str, Callable[[ModelConfig, Take], Decoder]] = {
    "LlamaForCausalLM": Llama(),  # Llama 2 and 3, SmolLM, SmolLM2, TinyLlama, ...
    "MistralForCausalLM": Llama(windows=same_window),
    "Qwen2ForCausalLM": Llama(qkv_bias=True, windows=qwen_windows),
    "Qwen3ForCausalLM": Llama(qk_norm=True, windows=qwen_windows),
    "Gemma2ForCausalLM": Gemma(qk_norm=False, pattern=2, caps=(50.0, 30.0)),
    "Gemma3ForCausalLM": Gemma(qk_norm=True, pattern=6),
    "Phi3ForCausalLM": build_phi3,
}


_TIED = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")  # families with tie_word_embeddings true by default


def read_config(
    config: Mapping[str, Any],
    dtype: str = "auto",
    device: str = "cpu",
    file: object = "config.json",
    quantization: str = "none",
    format: Format | None = None,
) -> ModelConfig:
    """Read a config.json; the error for an unknown architecture lists the supported ones.

    `file` is the config's source, for errors; `quantization` is the setting, `format` the checkpoint's.
    """
    values = Values(file, config)
    architecture = (values.texts("architectures") or ["(none named)"])[0]
    if architecture not in FAMILIES:
        raise ModelError(
            f"{file}: architecture {show(architecture)} is not supported: Chairlift runs {', '.join(sorted(FAMILIES))}"
        )
    found = read_common(architecture, values, dtype, device, ties=architecture in _TIED)
    if quantization != "none":
        if format is not None:
            raise SettingsError(
                f"quantization is {quantization}, but the weights of {file} are quantized already: leave it out"
            )
        format = OnLoad(KINDS[quantization])
    if format is not None:
        format.expands = device == "cpu" and (dtype != "auto" or not format.has_cpu_product)
        found = replace(found, format=format)
    outline(found)  # so that the family's own values are checked now
    return found


def build_decoder(config: ModelConfig, take: Take) -> Decoder:
    """Build a model's decoder from the tensors of `take`."""
    return FAMILIES[config.architecture](config, take)


def outline(config: ModelConfig) -> tuple[Decoder, dict[str, tuple[int, ...]]]:
    """Return a model's decoder without weights, and the name and shape of each of its tensors."""
    take = RecordingTake(config)
    return build_decoder(config, take), take.shapes


def record(config: ModelConfig, ranks: int = 1) -> RecordingTake:
    """Return the names, shapes and projections of a model's tensors; with a rank's config, those of its parts."""
    take = RecordingTake(config, ranks)
    build_decoder(config, take)
    return take
