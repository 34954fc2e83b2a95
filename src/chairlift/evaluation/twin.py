"""The model as a Hugging Face folder, so that all engines load the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from chairlift.core.errors import ChairliftError
from chairlift.core.settings import Settings
from chairlift.execution.build import choose_device
from chairlift.models.checkpoint import Checkpoint, GgufCheckpoint, open_checkpoint
from chairlift.models.config import ModelConfig
from chairlift.models.families import outline, read_config
from chairlift.models.loader import RandomTensors, TensorSource
from chairlift.models.shapes import config_alone
from chairlift.models.sources import resolve
from chairlift.offline.vocabulary import read_tokenizer

_SHARD_BYTES = 2 << 30


class Subject:
    """The model under test: its config and files, without its weights."""

    def __init__(self, model: str, settings: Settings) -> None:
        self._model = model
        self.is_random = settings.model.load_format == "dummy"
        self.device = choose_device(settings.model.device)
        self._checkpoint: Checkpoint | None = None if self.is_random else open_checkpoint(resolve(model))
        self._raw = self._checkpoint.config if self._checkpoint else config_alone(model)
        file = self._checkpoint.config_file if self._checkpoint else model
        wanted = settings.model
        given = self._raw, wanted.dtype, self.device.type, file, wanted.quantization
        self.config: ModelConfig = read_config(*given, self._checkpoint.format if self._checkpoint else None)

    def encode(self, text: str) -> list[int]:
        """Encode a prompt with the model's tokenizer."""
        tokenizer, problem = read_tokenizer(self._model, self._checkpoint)
        if tokenizer is None:
            raise ChairliftError(f"the workload's prompts cannot be encoded: {problem}; give prompt_tokens instead")
        return tokenizer.encode(text)

    def folder(self, scratch: Path) -> Path:
        """Return the model's own folder, or write one from its weights, once."""
        if self._checkpoint is not None and not isinstance(self._checkpoint, GgufCheckpoint):
            return self._checkpoint.path
        folder = scratch / "model"
        if not folder.exists():
            source = self._checkpoint or RandomTensors(self.config, torch.device("cpu"))
            write_folder(folder, self._raw, self.config, source)
        return folder


def write_folder(folder: Path, raw: dict[str, Any], config: ModelConfig, source: TensorSource) -> None:
    """Write config.json and safetensors, without a tokenizer: requests have token ids."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    dtype = str(config.dtype).removeprefix("torch.")
    described = {key: value for key, value in raw.items() if key != "generation_config"}
    kind = config.architecture.removesuffix("ForCausalLM").lower()
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **described, "torch_dtype": dtype}))
    placed = {}
    for number, names in enumerate(_shards(config)):
        file = f"model-{number:05}.safetensors"
        save_file({name: source.tensor(name, config.dtype).contiguous() for name in names}, folder / file)
        placed.update(dict.fromkeys(names, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def _shards(config: ModelConfig) -> Iterable[list[str]]:
    """Yield the names of the tensors of each file."""
    names: list[str] = []
    held = 0
    for name, shape in outline(config)[1].items():
        size = torch.Size(shape).numel() * config.dtype.itemsize
        if names and held + size > _SHARD_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names
