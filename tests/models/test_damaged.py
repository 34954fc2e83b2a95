"""Damaged model files: each loads and answers, or raises a one-line error, and takes little memory either way."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import damage
import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.errors import ChairliftError, ModelError, RequestError
from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.families import outline, read_config
from chairlift.text.tokenizer import Tokenizer

LONGEST_MESSAGE = 1000  # characters; a path may take hundreds


class Damage:
    """Writes damaged files, each a function of its seed."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.folders = damage.model_folders(scratch)
        self.ggufs = damage.gguf_models(scratch)

    def write(self, seed: int) -> Path:
        """Write one damaged model: a folder or a GGUF file."""
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return self.write_folder(damage.spoil_folder(rng, rng.choice(self.folders)))
        path, (metadata, tensors) = self.scratch / "case.gguf", rng.choice(self.ggufs)
        if rng.random() < 0.5:
            damage.write_gguf(path, damage.spoil_metadata(rng, metadata), tensors)
        else:
            damage.write_gguf(path, metadata, tensors)
            spoil = rng.choice((damage.spoil_bytes, damage.spoil_count))
            path.write_bytes(spoil(rng, path.read_bytes()))
        return path

    def write_folder(self, files: damage.Files) -> Path:
        """Write a model folder of exactly these files."""
        folder = self.scratch / "case"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder

    def sound(self) -> Iterator[Path]:
        """Yield every model before it is damaged."""
        for files in self.folders:
            yield self.write_folder(files)
        for metadata, tensors in self.ggufs:
            damage.write_gguf(self.scratch / "case.gguf", metadata, tensors)
            yield self.scratch / "case.gguf"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Damage:
    return Damage(tmp_path_factory.mktemp("damaged"))


def answer(path: Path) -> bool:
    """Load a model and generate from token ids and, with a tokenizer, from a text and a chat; return if it has one."""
    with LLM(str(path), progress=False) as llm:
        llm.get_default_sampling_params()
        params = SamplingParams(max_tokens=3, min_tokens=2)
        llm.generate([[1, 2, 3]], params, on_error="raise")
        if llm.tokenizer is not None:
            llm.generate("the chair", params, on_error="raise")
            llm.chat([{"role": "user", "content": "hello"}], params, on_error="raise")
        return llm.tokenizer is not None


def outcomes(files: Damage, seeds: range) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        path = files.write(seed)
        try:
            answer(path)
        except ChairliftError as error:
            said = str(error)
            assert said and "\n" not in said and len(said) < LONGEST_MESSAGE, f"seed {seed}: {said!r}"
            found["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        else:
            found["answered"] += 1
    return found


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_the_files_answer_before_they_are_damaged(files: Damage) -> None:
    assert all(answer(path) for path in files.sound())


@pytest.mark.long
def test_a_damaged_model_answers_or_raises_a_one_line_error(files: Damage) -> None:
    found = outcomes(files, range(300))
    assert min(found["answered"], found["refused"]) > 60, "damage must neither always nor never prevent loading"


@pytest.mark.long
def test_any_damaged_model_answers_or_raises_a_one_line_error(files: Damage) -> None:
    assert outcomes(files, range(1000, 6000)).total() == 5000


BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": "x"}, "config.json: num_hidden_layers is 'x': use a whole number from 1 to 10,000"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers is 10001"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": 2.5}, "hidden_size is 2.5"),
        ({"vocab_size": 10**400}, "vocab_size is 1000"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: use a divisor of num_attention_heads, which is 4"),
        ({"num_attention_heads": 5}, "hidden_size is 32: use a multiple of num_attention_heads, which is 5"),
        ({"head_dim": 7}, "head_dim is 7: use an even number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan: use a number above 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false': use true or false"),
        ({"architectures": 5}, "architectures is 5: use a list of strings"),
        ({"architectures": ["\n"]}, r"architecture '\n' is not supported"),
        ({"eos_token_id": ["a"]}, "eos_token_id is ['a']: use a token id or a list of them"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear': use an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing: use a number above 0"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.type is 'dynamic': use default, linear, llama3, yarn"),
        ({"rope_theta": 1}, "rope_theta is 1: use a number above 1"),
        ({"rope_freq_factors": [1.0]}, "rope_freq_factors is [1.0]: use 4 positive numbers"),
        ({"torch_dtype": 16}, "torch_dtype is 16: use a string of whole characters"),
        ({"generation_config": []}, "generation_config is []: use an object"),
    ],
)
def test_each_value_of_a_config_has_a_type_and_a_range(changed: dict[str, object], message: str) -> None:
    assert read_config(BASE).layers == 2
    with pytest.raises(ModelError) as caught:
        read_config({**BASE, **changed})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_layer_types_are_one_for_each_layer() -> None:
    qwen = {**BASE, "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
    kinds = ["full_attention", "sliding_attention"]
    assert [spec.window for spec in outline(read_config({**qwen, "layer_types": kinds}))[0].specs] == [0, 8]
    with pytest.raises(ModelError, match="use one entry for each of the 2 layers"):
        read_config({**qwen, "layer_types": [*kinds, "full_attention"]})


def test_an_end_token_that_the_weights_have_no_row_for_is_left_out() -> None:
    config = read_config({**BASE, "eos_token_id": [2, 64, -1], "generation_config": {"eos_token_id": 63}})
    assert config.eos_ids == {2, 63}


def test_an_end_token_that_only_the_tokenizer_has_is_ignored(files: Damage) -> None:
    spoken = {"bos_token": "<|begin|>", "eos_token": "<|new|>"}  # beyond the 320 tokens that have weights
    folder = files.write_folder({**files.folders[0], "tokenizer_config.json": json.dumps(spoken).encode()})
    with LLM(str(folder), progress=False) as llm:
        assert llm.get_tokenizer().eos_token_id == llm.config.vocab_size == 320
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, min_tokens=3, seed=0))
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"eos_token": "\ud800"}, "content is '\\ud800': use a string of whole characters"),
        ({"eos_token": 5}, "eos_token is 5: use strings or objects with a content for tokens"),
        ({"eos_token": {"special": True}}, "the token in eos_token: content is missing: use a string"),
        ({"eos_token": {"content": "x", "lstrip": "no"}}, "lstrip is 'no': use true or false"),
        ({"added_tokens_decoder": {"one": {"content": "x"}}}, "use token ids as keys"),
        ({"extra_special_tokens": 5}, "extra_special_tokens is 5: use a list of tokens"),
        ({"add_bos_token": "false"}, "add_bos_token is 'false': use true or false"),
        ({"chat_template": 5}, "chat_template is 5: use a string"),
        ({"chat_template": [{"name": "default"}]}, "chat_template: template is missing: use a string"),
    ],
)
def test_each_value_of_a_tokenizer_s_config_has_a_type(files: Damage, changed: dict[str, object], message: str) -> None:
    content = json.dumps({"bos_token": "<|begin|>", "eos_token": "<|end|>", **changed}).encode()
    folder = files.write_folder({**files.folders[0], "tokenizer_config.json": content})
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_folder(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with LLM(
        str(folder), progress=False
    ) as llm:  # the model generates from token ids, and an error says why not from text
        with pytest.raises(RequestError, match=r"text cannot be read: .*tokenizer_config"):
            llm.get_tokenizer()
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), on_error="raise")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "a\nb", 5, None])
def test_an_index_may_name_only_files_of_its_own_folder(files: Damage, name: object) -> None:
    folder = files.write_folder(files.folders[1])
    (files.scratch / "secret.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="use the names of files in its own folder") as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_of_links_is_a_model_as_in_the_hub_s_cache(files: Damage) -> None:
    folder = files.write_folder(files.folders[1])
    linked = files.scratch / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    assert answer(linked)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_pipe_in_a_model_folder_is_not_waited_for(files: Damage, name: str) -> None:
    folder = files.write_folder(files.folders[1])
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match="is not a file"):
        open_checkpoint(folder)


@pytest.mark.long
def test_huge_counts_allocate_no_memory(files: Damage) -> None:
    """Runs in its own process, so that the peak is the memory of these files."""
    script = Path(__file__).with_name("huge_counts.py")
    done = subprocess.run(
        [sys.executable, str(script), str(files.scratch / "huge")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    grown = json.loads(done.stdout)
    assert len(grown) >= 10
    assert max(grown.values()) < 300, f"MiB of peak memory by case: {grown}"
