"""Making an LLM: what it can be made of, and settings and models that are refused in one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM, ChairliftError, SamplingParams
from chairlift.core.errors import CapacityError, ModelError, RequestError, SettingsError
from tiny import make_tiny_model

BAD_SETTINGS: dict[str, tuple[dict[str, Any], type[ChairliftError], str]] = {
    "an unknown setting": ({"speed": 11}, SettingsError, "speed"),
    "a block size that is no multiple of 16": ({"block_size": 10}, SettingsError, "10"),
    "a context longer than the model's": ({"max_length": 100_000}, SettingsError, "100000"),
    "a step smaller than the batch": ({"step_tokens": 8, "max_sequences": 16}, SettingsError, "step_tokens is 8"),
    "no memory for one full request": ({"kv_tokens": 100}, CapacityError, "512"),
    "more cache than memory": ({"kv_tokens": 10**12}, CapacityError, "1,000,000,000,000"),
    "an unknown dtype": ({"dtype": "int3"}, SettingsError, "int3"),
    "an unknown device": ({"device": "abacus"}, SettingsError, "abacus"),
    "an unknown policy": ({"policy": "luck"}, SettingsError, "luck"),
}


@pytest.mark.parametrize(("settings", "kind", "named"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_a_bad_setting_is_one_clear_line(
    tiny_model: Path, settings: dict[str, Any], kind: type[ChairliftError], named: str
) -> None:
    with pytest.raises(kind) as caught:
        LLM(str(tiny_model), progress=False, **settings)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_lists_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["RwkvForCausalLM"]}')
    with pytest.raises(ModelError, match=r"RwkvForCausalLM.*LlamaForCausalLM"):
        LLM(str(tmp_path), progress=False, load_format="dummy")


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    config = (folder / "config.json").read_text().replace('"intermediate_size": 128', '"intermediate_size": 96')
    (folder / "config.json").write_text(config)
    with pytest.raises(ModelError, match="gate_proj"):
        LLM(str(folder), progress=False)


def test_random_weights_need_a_config_alone(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False)
    (folder / "model.safetensors").unlink()
    own = LLM(str(folder), progress=False, load_format="dummy", max_length=64)
    assert len(own.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4
    with pytest.raises(RequestError, match="token ids"):
        own.generate("text")


def test_random_weights_read_text_if_their_folder_has_a_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()
    own = LLM(str(folder), progress=False, load_format="dummy", max_length=64)
    answer = own.generate("once", SamplingParams(max_tokens=4, ignore_eos=True, structured={"regex": "[ab]{8}"}))[0]
    assert answer.outputs[0].text.strip("ab") == ""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_stays_close(tiny_model: Path, dtype: str) -> None:
    whole, half = (LLM(str(tiny_model), progress=False, dtype=each, max_length=64) for each in ("float32", dtype))
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    exact, rough = (engine.generate([5, 9, 33, 8], params)[0].outputs[0] for engine in (whole, half))
    assert rough.token_ids == exact.token_ids
    assert rough.cumulative_logprob == pytest.approx(exact.cumulative_logprob, abs=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_of_16_bits_keeps_them_on_a_cpu_and_answers_as_in_float32(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = make_tiny_model(tmp_path, tie_word_embeddings=True)
    file = folder / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    narrow, wide = (LLM(str(folder), progress=False, device="cpu", dtype=each) for each in ("auto", "float32"))
    assert wide.weight_bytes == 2 * narrow.weight_bytes and str(dtype).removeprefix("torch.") in narrow.weights
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=3, ignore_eos=True)
    answers = [[each.outputs[0] for each in llm.generate([[5, 9, 33], [8] * 40], params)] for llm in (narrow, wide)]
    assert answers[0] == answers[1]
