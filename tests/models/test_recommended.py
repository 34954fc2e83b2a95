"""A model's recommended sampling values are found in its files, or by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from gguf_models import hf_tensors, write_gguf

from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.recommended import recommended_sampling
from chairlift.models.sources import resolve
from chairlift.offline.defaults import read_defaults
from tiny import make_tiny_model


def gguf(path: Path, more: Callable[[GGUFWriter], object] = lambda writer: None) -> dict[str, Any]:
    return recommended_sampling(open_checkpoint(write_gguf(path, "llama", hf_tensors(), more)))[0]


NAMES = {
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "qwen2.5-7b-instruct-q8_0": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "Qwen3-0.6B-Q8_0": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "Qwen3-4B-Instruct-2507-Q4_K_M": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "Llama-3.2-1B-Instruct-f16": {"temperature": 0.6, "top_p": 0.9},
    "Meta-Llama-3.1-8B-Instruct.Q4_0": {"temperature": 0.6, "top_p": 0.9},
    "DeepSeek-R1-Distill-Qwen-1.5B": {"temperature": 0.6, "top_p": 0.95},
    "SmolLM2-360M-Instruct": {"temperature": 0.2, "top_p": 0.9},
    # Base models, and families without published values.
    "SmolLM2-135M": {},
    "Qwen2.5-0.5B": {},
    "Qwen3-0.6B-Base": {},
    "Llama-3.2-1B": {},
    "stories15M": {},
}


@pytest.mark.parametrize(("name", "values"), NAMES.items(), ids=NAMES.keys())
def test_a_gguf_file_has_what_is_published_for_its_family(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    assert gguf(tmp_path / f"{name}.gguf") == values
    assert gguf(tmp_path / "model.gguf", lambda writer: writer.add_name(name.replace("-", " "))) == values


def test_a_gguf_file_s_own_values_take_precedence(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.25)
        writer.add_int32("general.sampling.top_k", 7)
        writer.add_float32("general.sampling.penalty_repeat", 1.5)

    assert gguf(tmp_path / "Qwen3-0.6B.gguf", add) == {"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.5}


def test_the_default_model_has_its_published_values() -> None:
    found = read_defaults(open_checkpoint(resolve("smollm2-135m")), "auto")
    assert str(found) == "temperature 0.2, top_p 0.9 where a request names none (published for SmolLM2-Instruct)"


def test_a_folder_has_the_values_of_its_generation_config_and_warns_of_unusable_ones(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False)
    said = {
        "do_sample": False,
        "temperature": -1.0,
        "top_p": 0.8,
        "top_k": "many",
        "min_p": None,
        "repetition_penalty": 0,
        "max_new_tokens": 99,
        "eos_token_id": 1,
    }
    (folder / "generation_config.json").write_text(json.dumps(said))
    found = read_defaults(open_checkpoint(folder), "auto")
    assert found.values == {"top_p": 0.8, "max_tokens": 99}
    assert [warning.split(": ")[1].split(" is")[0] for warning in found.warnings] == [
        "temperature",
        "top_k",
        "repetition_penalty",
    ]
    assert read_defaults(open_checkpoint(folder), "none").values == {}
    assert read_defaults(None, "auto").values == {}
