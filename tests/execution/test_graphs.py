"""Captured steps, with and without prompts, padded to the next size. The function that a graph would replay is called
here, with kernels in Triton's interpreter; on a GPU tests/test_cuda.py captures it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU, kernels are compiled and not interpreted", allow_module_level=True)

from chairlift.core.settings import Settings
from chairlift.core.step import Step
from chairlift.execution.build import load_model
from chairlift.execution.draft_model import DraftModel
from chairlift.execution.graphs import Captured, Capturer, DecodeGraphs, Inputs
from chairlift.execution.mixed_graphs import MixedGraphs
from chairlift.execution.rows import Flat, Rows
from chairlift.execution.sampler import Sampler
from chairlift.execution.sharing import Grouping
from chairlift.models import blocks as blocks_module
from chairlift.ops import attention_cuda, decode_cuda
from chairlift.ops.batch import count_decodes
from tiny import make_tiny_model

MAX_ROWS, BLOCKS, BLOCK_SIZE = 12, 24, 16


class Uncaptured(Capturer):
    """Calls the function instead of capturing it, and writes results to a fixed buffer, as a graph does."""

    def capture(self, step: Callable[[], Any]) -> Captured:
        logits, tokens = step()
        return Captured(Call(step, tokens), logits, tokens)  # type: ignore[arg-type]


class Call:
    def __init__(self, step: Callable[[], Any], tokens: torch.Tensor) -> None:
        self._step, self._tokens = step, tokens

    def replay(self) -> None:
        tokens = self._step()[1]
        if tokens is not None:
            self._tokens.copy_(tokens)


def make_flat(pieces: list[tuple[int, int]], rows: list[int]) -> Flat:
    """Build slices of (tokens before, tokens now)."""
    starts = np.cumsum([0, *(now for _, now in pieces)])
    contexts = np.array([before + now for before, now in pieces])
    owner = np.repeat(np.arange(len(pieces)), np.diff(starts))
    positions = np.concatenate([np.arange(before, before + now) for before, now in pieces])
    return Flat(np.array(rows), starts, contexts, owner, positions, count_decodes(starts))


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MixedGraphs:
    return make_graphs(make_tiny_model(tmp_path, tokenizer=False), monkeypatch)


@pytest.fixture
def windowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MixedGraphs:
    """The captured steps of a model with two groups of layers, of which the first layers' has a window."""
    config = {"sliding_window": 24, "query_pre_attn_scalar": 20, "num_hidden_layers": 4}
    made = make_graphs(make_tiny_model(tmp_path, "Gemma2ForCausalLM", tokenizer=False, **config), monkeypatch)
    assert made._capturer.decoder.layout.groups == [1, 0, 1, 0]
    return made


def make_graphs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> MixedGraphs:
    """Build the captured steps over a cache of random contents, with random block tables in each group of layers."""
    monkeypatch.setattr(decode_cuda, "_FILLS_OF_FEW", 8)
    monkeypatch.setattr(decode_cuda, "_COUNTED", 16)
    decoder = load_model(str(folder), Settings.of(dtype="float16", device="cpu"), progress=False).decoder
    config, groups = decoder.config, len(decoder.layout.windows)
    grouping = Grouping(BLOCK_SIZE, config.kv_heads, decode_cuda.members_of_item(config.heads, config.kv_heads))
    rows = Rows(
        MAX_ROWS, BLOCKS * BLOCK_SIZE, BLOCK_SIZE, decoder.device, grouping if groups == 1 else None, groups=groups
    )
    count = groups * MAX_ROWS * BLOCKS
    rows.keep_tables_on_device(count)
    cache = decoder.make_cache(count + 1, BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
    rows.tokens[:MAX_ROWS].copy_(torch.randint(0, config.vocab_size, rows.tokens[:MAX_ROWS].shape, generator=generator))
    rows._tables[:] = np.random.default_rng(0).permutation(count).reshape(groups, MAX_ROWS, BLOCKS)
    rows.device_tables[:, :MAX_ROWS] = torch.from_numpy(rows._tables)
    return MixedGraphs(Uncaptured(decoder, cache, rows, MAX_ROWS), 128)


CASES = [
    pytest.param(pieces, rows, id=name, marks=[pytest.mark.long] if is_long else [])
    for name, is_long, pieces, rows in (
        ("decodes and a prompt", False, [(40, 1), (9, 1), (0, 20)], [3, 7, 0]),
        ("a chunk after others", True, [(3, 1), (50, 60)], [1, 2]),
        ("the last tokens of two prompts", True, [(7, 1), (0, 40), (30, 1), (64, 3)], [0, 11, 5, 6]),
        ("prompts alone, and the whole step", True, [(0, 100), (0, 28)], [4, 9]),
        ("as many as there are rows", False, [*((5 * i, 1) for i in range(11)), (0, 5)], list(range(12))),
    )
]


def expect(graphs: MixedGraphs, flat: Flat, wanted: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of plain torch, and the cache afterwards."""
    capturer = graphs._capturer
    before = capturer.cache.data.clone()
    inputs, batch = capturer.rows.gather(flat)
    batch.shared = None
    hidden = capturer.decoder.forward(inputs, batch, capturer.cache, None)
    logits, stored = capturer.decoder.logits(hidden[torch.from_numpy(wanted)]), capturer.cache.data.clone()
    capturer.cache.data.copy_(before)
    return logits, stored


def check(graphs: MixedGraphs, flat: Flat, shared: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    capturer = graphs._capturer
    wanted = np.concatenate([flat.starts[1:] - 1, flat.starts[-1:] - 1])[-MAX_ROWS:]  # the last token is sampled twice
    rows, positions = np.arange(wanted.size), np.full(wanted.size, 200)
    logits, stored = expect(graphs, flat, wanted)
    monkeypatch.setattr(blocks_module, "paged_attention", attention_cuda.attend)
    size = graphs.size_for(flat, wanted.size)
    assert size is not None
    found, tokens = graphs.run(size, flat, shared, wanted, rows, positions)
    assert torch.allclose(found.float(), logits.float(), atol=0.02, rtol=0.02)
    assert torch.equal(tokens, found.argmax(-1)) and torch.equal(capturer.rows.tokens[rows, 200].long(), tokens)
    spare = capturer.rows.scratch_block  # padding may write to it
    assert torch.allclose(capturer.cache.data[:, :spare].float(), stored[:, :spare].float(), atol=0.02, rtol=0.02)
    return size


@pytest.mark.parametrize(("pieces", "rows"), CASES)
@torch.inference_mode()
def test_a_padded_step_matches_a_plain_one(
    graphs: MixedGraphs, pieces: list[tuple[int, int]], rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = make_flat(pieces, rows)
    assert check(graphs, flat, None, monkeypatch) >= flat.positions.size


@pytest.mark.parametrize(("pieces", "rows"), CASES[:3])
@torch.inference_mode()
def test_each_layer_of_a_padded_step_reads_the_tables_of_its_group(
    windowed: MixedGraphs, pieces: list[tuple[int, int]], rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(windowed, make_flat(pieces, rows), None, monkeypatch)


@torch.inference_mode()
def test_a_decode_step_applies_changes_in_each_group(windowed: MixedGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    capturer = windowed._capturer
    rows, decodes = capturer.rows, DecodeGraphs(capturer)
    chosen, positions = np.array([3, 7, 0]), np.array([40, 9, 100])
    new = rows._tables[:, 11, 0].copy()  # now unused
    changes = Step(table_rows=[3, 3], table_places=[2, 2], table_blocks=new.tolist(), table_groups=[0, 1])
    rows.update(changes)
    logits, stored = expect(windowed, make_flat([(int(at), 1) for at in positions], chosen.tolist()), np.arange(3))
    monkeypatch.setattr(blocks_module, "paged_attention", attention_cuda.attend)
    found, tokens = decodes.run(chosen, positions, None, True)
    assert torch.allclose(found.float(), logits.float(), atol=0.02, rtol=0.02)
    assert tokens is not None and torch.equal(rows.tokens[chosen, positions + 1].long(), tokens)
    assert rows.device_tables[:, 3, 2].tolist() == new.tolist() and not rows._places
    spare = rows.scratch_block
    assert (rows.device_tables[:, MAX_ROWS] == spare).all(), "the scratch row has only the scratch block"
    assert torch.allclose(capturer.cache.data[:, :spare].float(), stored[:, :spare].float(), atol=0.02, rtol=0.02)


@pytest.mark.long
@torch.inference_mode()
def test_decodes_with_a_shared_prefix_are_grouped_beside_a_prompt(
    graphs: MixedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = graphs._capturer.rows
    rows._tables[0, :6, :17] = rows._tables[0, 0, :17]
    rows.device_tables[:, :6] = torch.from_numpy(rows._tables[:, :6])
    flat = make_flat([(17 * 16 + 5 * i, 1) for i in range(6)] + [(0, 9)], [0, 1, 2, 3, 4, 5, 8])
    shared = rows.find_shared(flat.rows[:6], flat.contexts[:6])
    assert shared is not None and (shared.prefixes == 17 * 16).all()
    check(graphs, flat, shared, monkeypatch)


@torch.inference_mode()
def test_a_decode_step_applies_changes_of_the_block_tables(
    graphs: MixedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturer = graphs._capturer
    rows, decodes = capturer.rows, DecodeGraphs(capturer)
    chosen, positions = np.array([3, 7, 0, 5, 9]), np.array([40, 9, 100, 16, 63])
    other = int(rows._tables[0, 11, 0])  # now unused
    rows._tables[0, 3, 2] = other
    rows._places, rows._changed = [3 * BLOCKS + 2], [other]
    logits, stored = expect(graphs, make_flat([(int(at), 1) for at in positions], chosen.tolist()), np.arange(5))
    monkeypatch.setattr(blocks_module, "paged_attention", attention_cuda.attend)
    found, tokens = decodes.run(chosen, positions, None, True)
    assert torch.allclose(found.float(), logits.float(), atol=0.02, rtol=0.02)
    assert tokens is not None and torch.equal(tokens, found.argmax(-1))
    assert torch.equal(rows.tokens[chosen, positions + 1].long(), tokens)
    assert rows.device_tables[0, 3, 2] == other and not rows._places
    assert (rows.device_tables[:, MAX_ROWS] == MAX_ROWS * BLOCKS).all(), "the scratch row has only the scratch block"
    spare = MAX_ROWS * BLOCKS
    assert torch.allclose(capturer.cache.data[:, :spare].float(), stored[:, :spare].float(), atol=0.02, rtol=0.02)
    again, nothing = decodes.run(chosen, positions, None, False)
    assert nothing is None and torch.allclose(again.float(), logits.float(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("step_tokens", "pieces", "samples", "size"),
    [
        (8192, [(5, 1), (0, 31)], 2, 32),
        (8192, [(5, 1), (0, 32)], 2, 64),
        (8192, [(0, 2048)], 1, 2048),
        (8192, [(0, 2049)], 1, None),  # a long prompt, which another attention kernel computes
        (8192, [(9000, 2048)], 1, 2048),
        (8192, [(0, 1500), (0, 1500)], 2, 3072),
        (8192, [(0, 5)], 40, 64),  # answers forked from one prompt
        (100, [(0, 97)], 1, 100),
        (12, [(0, 3)], 1, 12),
        (12, [(i, 1) for i in range(12)], 12, None),  # no room for a prompt
    ],
)
def test_a_step_runs_as_the_next_larger_size(
    graphs: MixedGraphs, step_tokens: int, pieces: list[tuple[int, int]], samples: int, size: int | None
) -> None:
    capturer = graphs._capturer
    capturer.max_samples = 64
    assert MixedGraphs(capturer, step_tokens).size_for(make_flat(pieces, [0] * len(pieces)), samples) == size


def test_inputs_without_a_value_are_blank() -> None:
    inputs = Inputs(torch.device("cpu"), {"rows": (5,), "tiles": (2, 3), "more": (4,)}, {"rows": 7})
    inputs.send(rows=np.array([1, 2]), tiles=np.array([[3, 4, 5]]), more=np.arange(4))
    inputs.send(rows=np.array([1]), tiles=np.zeros((0, 3)))
    assert inputs["rows"].tolist() == [1, 7, 7, 7, 7]
    assert inputs["tiles"].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert inputs["more"].tolist() == [0, 1, 2, 3], "not sent again"
    inputs.clear()
    assert inputs["rows"].tolist() == [7] * 5 and inputs["more"].tolist() == [0] * 4


@pytest.mark.long
@torch.inference_mode()
def test_a_check_of_drafts_runs_as_decodes_of_one_row(graphs: MixedGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of 1 + k tokens, computed as 1 + k decodes: each attends to the tokens before it, of this step, too."""
    made = graphs._capturer
    capturer = Uncaptured(made.decoder, made.cache, made.rows, MAX_ROWS, drafts=20)
    step = Step(rows=[3, 7, 0], starts=[40, 9, 100], counts=[1, 5, 3], tokens=9, sample_rows=[3, 7, 0])
    step.sampled_at, step.drafts = [0, 5, 8], [(1, [4, 5, 6, 7]), (2, [8, 9])]
    logits, stored = expect(graphs, Flat.of(step), np.arange(9))
    flat = Flat.of(step, checks_as_decodes=True)
    assert flat.rows.tolist() == [3, 7, 7, 7, 7, 7, 0, 0, 0]
    assert flat.positions.tolist() == [40, 9, 10, 11, 12, 13, 100, 101, 102]
    assert (flat.contexts == flat.positions + 1).all() and flat.is_decodes
    monkeypatch.setattr(blocks_module, "paged_attention", attention_cuda.attend)
    found, tokens = DecodeGraphs(capturer).run(flat.rows, flat.positions, None, True)
    assert torch.allclose(found.float(), logits.float(), atol=0.02, rtol=0.02)
    assert tokens is not None and torch.equal(tokens, found.argmax(-1))
    spare = capturer.rows.scratch_block
    assert torch.allclose(capturer.cache.data[:, :spare].float(), stored[:, :spare].float(), atol=0.02, rtol=0.02)


@pytest.mark.long
@torch.inference_mode()
def test_a_prompt_stays_whole_behind_the_checks_of_its_step(
    graphs: MixedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(rows=[3, 7, 2], starts=[40, 9, 0], counts=[1, 3, 20], tokens=24, sample_rows=[3, 7, 2])
    step.sampled_at, step.drafts = [0, 3, 23], [(1, [4, 5])]
    flat = Flat.of(step, checks_as_decodes=True)
    assert (flat.rows.tolist(), flat.starts.tolist(), flat.decodes) == ([3, 7, 7, 7, 2], [0, 1, 2, 3, 4, 24], 4)
    logits, _ = expect(graphs, Flat.of(step), np.array([0, 1, 2, 3, 23]))
    assert torch.allclose(logits.float(), expect(graphs, flat, np.array([0, 1, 2, 3, 23]))[0].float(), atol=0.02)
    check(graphs, flat, None, monkeypatch)


@pytest.mark.long
@torch.inference_mode()
def test_a_draft_model_drafts_the_same_in_captured_passes(graphs: MixedGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of which it has computed all but one token, all but two, and nothing; with drafts of different lengths."""
    made = graphs._capturer
    rows, decoder = made.rows, made.decoder
    sampler = Sampler(MAX_ROWS, rows.tokens, decoder.config.vocab_size)
    chosen, starts, counts = np.array([3, 7, 0, 5]), np.array([40, 9, 100, 16]), np.array([3, 1, 4, 2])
    text = rows.tokens.clone()
    found = []
    for is_captured in (False, True):
        rows.tokens.copy_(text)
        model = DraftModel(decoder, decoder.make_cache(rows.scratch_block + 1, BLOCK_SIZE), rows, sampler, MAX_ROWS)
        for known in (0, 1, 2):  # a prompt is read, then a token or two are missing
            with monkeypatch.context() as patch:
                if is_captured and known:
                    patch.setattr(blocks_module, "paged_attention", attention_cuda.attend)
                    capturer = Uncaptured(decoder, model._cache, rows, MAX_ROWS, MAX_ROWS)
                    model.graphs = DecodeGraphs(capturer)
                begins = starts + 2 * known
                if known:
                    model._computed[chosen] = begins - np.array([known - 1, 0, known - 1, 0])
                model.draft(chosen, begins, counts)
            assert (model._computed[chosen] == begins + counts).all()
            found.append(
                [rows.tokens[row, begins[i] + 1 : begins[i] + 1 + counts[i]].tolist() for i, row in enumerate(chosen)]
            )
    assert found[:3] == found[3:]
