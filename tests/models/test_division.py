"""A rank reads its part of every tensor and no more; the parts of all ranks are the whole model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf_models import finish
from test_gguf import random_blocks

from chairlift.core.errors import SettingsError
from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.cut import Cut
from chairlift.models.division import divides, of_one_rank, rows_of_rank
from chairlift.models.families import read_config, record
from chairlift.models.gguf import GgufFile
from chairlift.models.loader import LoadingTake, load_decoder
from chairlift.models.shapes import SHAPES
from chairlift.models.sources import DEFAULT_MODEL, resolve
from chairlift.ops.block_formats import FORMATS
from test_greedy import MODELS
from tiny import make_tiny_model

CUTS = [Cut(0, ((4, 8),)), Cut(0, ((0, 4), (12, 16))), Cut(1, ((256, 512),)), Cut(1, ((40, 300),)), Cut(1, ((0, 768),))]


@dataclass(frozen=True)
class Place:
    """The number of a rank, without other ranks: enough to load its part."""

    rank: int
    size: int

    def sum(self, x: Any) -> Any:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def least(self, number: int) -> int:
        return number


@pytest.mark.parametrize("number", FORMATS, ids=lambda number: FORMATS[number].name)
def test_a_part_of_a_gguf_tensor_is_cut_from_its_blocks(number: int, tmp_path: Path) -> None:
    form = FORMATS[number]
    blocks = random_blocks(form, 16 * 768 // form.values)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    raw = blocks.reshape(16, -1)
    writer.add_tensor("matrix", raw, raw_dtype=gguf.GGMLQuantizationType(number))
    writer.add_tensor("vector", np.arange(16, dtype=np.float32))
    finish(writer)
    file = GgufFile(tmp_path / "model.gguf")
    whole = file.read("matrix")
    for cut in CUTS:
        file.read_bytes = 0
        assert torch.equal(file.read("matrix", cut=cut), cut.of(whole))
        rows = sum(last - first for first, last in cut.ranges) if cut.dimension == 0 else 16
        first, last = cut.ranges[0] if cut.dimension else (0, 768)
        covering = -(-last // form.values) - first // form.values
        assert file.read_bytes == rows * covering * form.nbytes
    assert file.read("vector", cut=Cut(0, ((4, 8),))).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(("architecture", "config"), MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_parts_of_all_ranks_are_the_whole_model(
    architecture: str, config: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, architecture, tokenizer=False, **config)
    checkpoint = open_checkpoint(folder)
    found = read_config(checkpoint.config)
    whole, own = record(found), record(of_one_rank(found, ranks), ranks)
    for name, shape in whole.shapes.items():
        tensor = checkpoint.tensor(name)
        takes = [
            LoadingTake(checkpoint, torch.float32, torch.device("cpu"), lambda _: None, Place(rank, ranks), whole.parts)
            for rank in range(ranks)
        ]
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            assert torch.equal(
                torch.cat(
                    [take.vocabulary(name, *shape).lookup(torch.arange(-(-shape[0] // ranks))) for take in takes]
                )[: shape[0]],
                tensor,
            )
        elif name in whole.parts and own.parts[name] != whole.parts[name]:
            seen = torch.zeros(shape[0], dtype=torch.bool)
            for rank in range(ranks):
                cut = rows_of_rank(own.parts[name], whole.parts[name], rank, ranks)
                read = takes[rank].bias(name, own.parts[name])
                assert torch.equal(read, cut.of(tensor))
                for first, last in cut.ranges:
                    seen[first:last] = True
            assert seen.all(), name


def test_each_rank_reads_its_share_of_a_folder(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False, num_key_value_heads=4)
    sizes = []
    for rank in range(4):
        checkpoint = open_checkpoint(folder)
        load_decoder(read_config(checkpoint.config), checkpoint, torch.device("cpu"), 64, group=Place(rank, 4))
        sizes.append(checkpoint.read_bytes)
    norms = sum(checkpoint.tensor(name).nbytes for name in checkpoint.names() if "norm" in name)
    assert sizes == [(checkpoint.nbytes() - norms) // 4 + norms] * 4


def test_each_rank_reads_its_share_of_the_default_model() -> None:
    checkpoint = open_checkpoint(resolve(DEFAULT_MODEL, progress=False))
    config = read_config(checkpoint.config)
    load_decoder(config, checkpoint, torch.device("cpu"), 64, group=Place(1, 3))
    norms = 4 * (2 * config.layers + 1) * config.hidden_size
    assert checkpoint.read_bytes == (checkpoint.nbytes() - norms) // 3 + norms


def test_a_70b_divides_over_up_to_64_ranks_and_its_kv_heads_are_repeated_above_8() -> None:
    config = read_config({**SHAPES["llama-3.1-8b"], "num_attention_heads": 64, "hidden_size": 8192})
    assert [ranks for ranks in range(1, 65) if divides(config, ranks)] == [1, 2, 4, 8, 16, 32, 64]
    assert [of_one_rank(config, ranks).kv_heads for ranks in (2, 8, 16)] == [4, 1, 1]
    first = [rows_of_rank(128, 8 * 128, rank, 16).ranges[0][0] // 128 for rank in range(16)]
    assert first == [head for head in range(8) for _ in range(2)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "ranks", "works"),
    [(9, 3, 1536, 2, "1 or 3"), (14, 2, 4864, 4, "1 or 2"), (12, 3, 100, 5, "1"), (4, 4, 128, 8, "1, 2 or 4")],
)
def test_what_does_not_divide_names_the_sizes_that_work(
    heads: int, kv_heads: int, inner: int, ranks: int, works: str
) -> None:
    config = replace(read_config(SHAPES["stories15m"]), heads=heads, kv_heads=kv_heads, inner_size=inner)
    with pytest.raises(SettingsError, match=f"tensor_parallel is {ranks}, .*: use {works}$"):
        of_one_rank(config, ranks)
