"""A model's recommended sampling values: from generation_config.json, GGUF metadata, or its model card."""

from __future__ import annotations

import re
from typing import Any

from chairlift.models.checkpoint import Checkpoint, GgufCheckpoint

# Field of SamplingParams -> key of generation_config.json, and of GGUF metadata under general.sampling.
_NAMES = {
    "temperature": ("temperature", "temp"),
    "top_p": ("top_p", "top_p"),
    "top_k": ("top_k", "top_k"),
    "min_p": ("min_p", "min_p"),
    "repetition_penalty": ("repetition_penalty", "penalty_repeat"),
    "max_tokens": ("max_new_tokens", None),
}

_QWEN2 = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
_THINKING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
# GGUF files rarely have the values, so they are here by family: a pattern of the model's and the file's name, the
# family, and the values of its model card or generation_config.json. The first match is used.
_FAMILIES: tuple[tuple[str, str, dict[str, float]], ...] = (
    (r"deepseek-r1-distill", "DeepSeek-R1-Distill", {"temperature": 0.6, "top_p": 0.95}),
    (r"smollm2.*instruct", "SmolLM2-Instruct", {"temperature": 0.2, "top_p": 0.9}),
    (r"qwen-?2\.5.*instruct", "Qwen2.5-Instruct", _QWEN2),
    (r"qwen-?2\b.*instruct", "Qwen2-Instruct", _QWEN2),
    (r"qwen-?3.*instruct-2507", "Qwen3-Instruct-2507", {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
    (r"qwen-?3\b(?!.*\bbase\b)", "Qwen3", _THINKING),
    (r"llama-?3.*instruct", "Llama-3-Instruct", {"temperature": 0.6, "top_p": 0.9}),
)


def recommended_sampling(checkpoint: Checkpoint) -> tuple[dict[str, Any], str]:
    """Return the values by field of SamplingParams, unchecked, and their source.

    `do_sample` is ignored, as in vLLM: the temperature applies even if it is false.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        metadata = {ours: checkpoint.metadata.get(f"general.sampling.{theirs}") for ours, (_, theirs) in _NAMES.items()}
        if found := _given(metadata):
            return found, "the file's metadata"
        return _published(checkpoint)
    config = checkpoint.config.get("generation_config") or {}  # the checkpoint has checked that it is an object
    return _given({ours: config.get(theirs) for ours, (theirs, _) in _NAMES.items()}), "generation_config.json"


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _published(checkpoint: GgufCheckpoint) -> tuple[dict[str, Any], str]:
    named = [str(checkpoint.metadata.get(f"general.{key}", "")) for key in ("name", "basename", "finetune")]
    name = re.sub(r"[\s_-]+", "-", "-".join([*named, checkpoint.path.stem]).lower())
    for pattern, family, values in _FAMILIES:
        if re.search(pattern, name):
            return dict(values), f"published for {family}"
    return {}, ""
