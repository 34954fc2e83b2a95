"""Checkpoints: a model's config and tensors under Hugging Face's names, from safetensors or GGUF."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from chairlift.core.errors import ModelError
from chairlift.core.values import Values, is_name, show
from chairlift.json_file import read_json
from chairlift.models.cut import Cut
from chairlift.models.gguf import GgufFile
from chairlift.models.gguf_config import ROPE_FACTORS, hf_config, hf_layout, hf_name
from chairlift.models.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    import torch

    from chairlift.models.formats.format import Format, StoredFormat
    from chairlift.ops.weight import Weight

INDEX = "model.safetensors.index.json"
HALVES = ("bfloat16", "float16")


class Checkpoint(Protocol):
    """A model's config and weights."""

    @property
    def path(self) -> Path:
        """The checkpoint's folder or file."""

    @property
    def config(self) -> dict[str, Any]:
        """config.json, with generation_config.json, if any, under "generation_config"."""

    @property
    def config_file(self) -> Path:
        """The file that the config was read from."""

    @property
    def format(self) -> Format | None:
        """The format of matrices that are stored quantized, other than GGUF's; None if there are none."""

    def names(self) -> list[str]:
        """Return the Hugging Face names of all tensors."""

    def nbytes(self) -> int:
        """Return the bytes of all tensors on disk."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""

    keeps_stored: bool
    """Whether `weight` returns matrices as they are stored: GGUF's blocks, and 16 bits in a float32 model."""

    @property
    def read_bytes(self) -> int:
        """The bytes of tensors, as they are stored, that `tensor` has read so far."""

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        *,
        cut: Cut | None = None,
    ) -> torch.Tensor:
        """Read a tensor or a part of it; without a dtype as it is stored, or as float32 if it is quantized."""

    def weight(self, name: str, dtype: torch.dtype, device: torch.device, *, cut: Cut | None = None) -> Weight:
        """Read a matrix or a part of it in the format that products with it use; `dtype` is the model's."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder of safetensors, a folder with one GGUF file, or a GGUF file.

    >>> checkpoint = open_checkpoint(resolve("smollm2-135m"))  # doctest: +SKIP
    >>> checkpoint.config["num_hidden_layers"], len(checkpoint.names())  # doctest: +SKIP
    (30, 272)
    """
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if any(path.glob("*.safetensors")) or not ggufs:
            return SafetensorsCheckpoint(path)
        if len(ggufs) > 1:
            raise ModelError(f"{path} holds several GGUF files; name one: {', '.join(each.name for each in ggufs)}")
        return GgufCheckpoint(ggufs[0])
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} is only the weights: name its folder, which must also hold config.json")
    if not path.exists():
        raise ModelError(f"{path} does not exist: expected a folder with config.json and safetensors, or a GGUF file")
    return GgufCheckpoint(path)


class SafetensorsCheckpoint:
    """A folder as on the Hugging Face hub: config.json and one or more safetensors files."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config_file = folder / "config.json"
        if not self.config_file.exists():
            raise ModelError(
                f"{folder} has no config.json: expected a model folder as on the Hugging Face hub, or a GGUF file"
            )
        self.config = read_json(self.config_file)
        if (folder / "generation_config.json").exists():
            self.config["generation_config"] = read_json(folder / "generation_config.json")
        Values(self.config_file, self.config).part(
            "generation_config"
        )  # checks that it is an object, also if config.json itself has it
        self.keeps_stored = False
        self.read_bytes = 0
        self._touched: list[str] = []  # tensors that a format has read since pages were last released
        self._files: dict[str, SafetensorsFile] = {}
        index = self._index()
        for shard in self._shards(index):
            file = SafetensorsFile(shard)
            twice = sorted(self._files.keys() & file.tensors.keys())
            if twice:
                raise ModelError(
                    f"{shard} and another file of its folder both hold tensor {twice[0]}: remove one of them"
                )
            self._files.update(dict.fromkeys(file.tensors, file))
        for name, owner in index.items():
            if name not in self._files:
                raise ModelError(
                    f"{folder}: {INDEX} says that {owner} holds tensor {name}, but it does not: "
                    "the files belong to different models; fetch the model again"
                )

    @functools.cached_property
    def format(self) -> StoredFormat | None:
        """The format of quantized matrices; None if there are none."""
        from chairlift.models.formats import find_format

        return find_format(Values(self.config_file, self.config), self)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor."""
        return name in self._files

    def nbytes(self) -> int:
        """Return the bytes of all tensors on disk."""
        return sum(file.tensors[name].nbytes for name, file in self._files.items())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it; of a quantized matrix, its outputs and inputs."""
        if self.format is not None and self.format.covers(name):
            return self.format.shape(name)
        return self.stored_shape(name)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in its file."""
        return self._file(name).tensors[name].shape

    def stored(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored: a view of its file."""
        tensor = self._file(name).read(name)
        self.read_bytes += tensor.nbytes
        self._touched.append(name)
        return tensor

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        *,
        cut: Cut | None = None,
    ) -> torch.Tensor:
        """Read a tensor or a part of it: a view of the file unless dtype or device differ or columns are cut.

        A quantized matrix is read as its numbers.
        """
        if self.format is not None and self.format.covers(name):
            import torch

            wanted = dtype or torch.float32
            return self.format.read(name, wanted, device or torch.device("cpu"), cut).numbers().to(wanted)
        stored = self._file(name).read(name)
        stored = stored if cut is None else cut.of(stored)  # the other pages of the mapped file are not touched
        self.read_bytes += stored.nbytes
        tensor = stored.to(device=device, dtype=dtype)
        if tensor is not stored:
            self._file(name).release(name)
        return tensor

    def weight(self, name: str, dtype: torch.dtype, device: torch.device, *, cut: Cut | None = None) -> Weight:
        """Read a matrix or a part of it."""
        from chairlift.ops.dense import Dense

        if self.format is not None and self.format.covers(name):
            read = self.format.read(name, dtype, device, cut)
            weight = read.dense() if self.format.expands else read
            self._release()
            return weight
        stored = self._file(name).tensors[name].dtype
        if stored.startswith("float8"):
            raise ModelError(
                f"{self.path}: tensor {name} is {stored} without scales, so its numbers are not known: the config's "
                "quantization_config or the tensor's scales are missing"
            )
        if self.keeps_stored and stored in HALVES:
            return Dense(self.tensor(name, cut=cut), dtype, lambda: self._file(name).release(name))
        return Dense(self.tensor(name, dtype, device, cut=cut))

    def _release(self) -> None:
        """Drop the pages of the tensors of a matrix that has been read."""
        for name in self._touched:
            self._file(name).release(name)
        self._touched.clear()

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            raise _missing(self.path, name, self.names())
        return self._files[name]

    def _index(self) -> dict[str, str]:
        """Return the shard of each tensor, from the index; empty without an index."""
        path = self.path / INDEX
        if not path.exists():
            return {}
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{path} has no weight_map: the file is damaged; delete it and fetch it again")
        for name, file in weight_map.items():
            # Shards must be in the index's folder. Symbolic links are followed: the hub's cache consists of them.
            if not is_name(name) or not is_name(file) or Path(file).name != file:
                raise ModelError(
                    f"{path} says that {show(file)} holds tensor {show(name)}: use the names of files in its own folder"
                )
        return weight_map

    def _shards(self, index: dict[str, str]) -> list[Path]:
        """Return the files of the model."""
        named = sorted(set(index.values()))
        if named:
            missing = [name for name in named if not (self.path / name).is_file()]
            if missing:
                raise ModelError(
                    f"{self.path} lacks {missing[0]} ({len(missing)} of the {len(named)} files in {INDEX}): "
                    "the download is incomplete; fetch the model again"
                )
            return [self.path / name for name in named]
        whole = self.path / "model.safetensors"
        shards = [whole] if whole.is_file() else sorted(self.path.glob("*.safetensors"))
        if not shards:
            raise self._no_weights()
        return shards

    def _no_weights(self) -> ModelError:
        pickles = [each.name for end in ("bin", "pt", "pth") for each in self.path.glob(f"*.{end}")]
        if pickles:
            return ModelError(
                f"{self.path} holds weights only as {pickles[0]}, a pickle, which can run any code when it is loaded: "
                "only safetensors and GGUF are read; look for the same model in one of them, or convert it"
            )
        return ModelError(f"{self.path} holds no weights: expected *.safetensors next to config.json, or a GGUF file")


class GgufCheckpoint:
    """One GGUF file."""

    format: Format | None = None

    def __init__(self, path: Path) -> None:
        self.path = self.config_file = path
        self.keeps_stored = False
        self._file = GgufFile(path)
        self.config = hf_config(self._file)
        self.metadata = {key: value for key, value in self._file.metadata.items() if not isinstance(value, list)}
        self._file.metadata = self.metadata  # the tokens and merges of a tokenizer take tens of megabytes
        try:
            self._gguf_names = {hf_name(name): name for name in self._file.tensors if name != ROPE_FACTORS}
        except ModelError as problem:
            raise ModelError(f"{path}: {problem}") from problem

    @property
    def read_bytes(self) -> int:
        """The bytes of tensors, as they are stored, that `tensor` has read so far."""
        return self._file.read_bytes

    def read_metadata(self) -> dict[str, Any]:
        """Read all of the file's metadata, which includes the tokenizer; `metadata` has no lists."""
        return self._file.read_metadata()

    def names(self) -> list[str]:
        """Return the Hugging Face names of all tensors."""
        return list(self._gguf_names)

    def nbytes(self) -> int:
        """Return the bytes of all tensors on disk."""
        return sum(self._file.tensors[name].nbytes for name in self._gguf_names.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self._file.tensors[self._gguf_name(name)].shape

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        *,
        cut: Cut | None = None,
    ) -> torch.Tensor:
        """Read a tensor or a part of it, dequantized, with its rows in Hugging Face's order.

        Rows of queries and keys must be cut in whole heads: their order differs within each head.
        """
        gguf_name = self._gguf_name(name)
        import torch

        plain = self._file.tensors[gguf_name].type.plain
        stored = None if plain is None else getattr(torch, plain)
        weights = self._file.read(gguf_name, dtype or stored, device, cut)
        return hf_layout(weights, gguf_name, self.config)

    def weight(self, name: str, dtype: torch.dtype, device: torch.device, *, cut: Cut | None = None) -> Weight:
        """Read a matrix or a part of it, dequantized unless it is kept as it is stored."""
        from chairlift.ops.blocks import Blocks
        from chairlift.ops.dense import Dense

        gguf_name = self._gguf_name(name)
        form = self._file.tensors[gguf_name].type
        if self.keeps_stored and form.plain in HALVES:
            return Dense(self.tensor(name, cut=cut), dtype, lambda: self._file.release(gguf_name))
        if self.keeps_stored and form.plain is None:
            blocks, rest = self._file.blocks(gguf_name, cut)
            if rest is None:  # else the cut divides blocks, which have one scale
                ordered = hf_layout(blocks, gguf_name, self.config)
                return Blocks(ordered, form, lambda: self._file.release(gguf_name))
        return Dense(self.tensor(name, dtype, device, cut=cut))

    @property
    def is_quantized(self) -> bool:
        """Whether matrices are in a quantized format."""
        return any(tensor.type.plain is None for tensor in self._file.tensors.values())

    def _gguf_name(self, name: str) -> str:
        if name not in self._gguf_names:
            raise _missing(self.path, name, self.names())
        return self._gguf_names[name]


def _missing(path: Path, name: str, names: list[str]) -> ModelError:
    some = ", ".join(names[:3])
    return ModelError(
        f"{path} has no tensor {name} (it has {len(names)}: {some}, ...): "
        "the checkpoint is incomplete or of another architecture than its config says"
    )
