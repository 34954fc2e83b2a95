"""The draft model: its drafts are its own greedy answers, whatever was accepted before, and they change no answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chairlift import LLM, SamplingParams
from chairlift.core.errors import SettingsError
from chairlift.execution.draft_model import DraftModel
from drafts import drafting, prompts_of, tokens_of
from mostly_long import mostly_long
from tiny import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "model", tokenizer=False)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another family, size and head size, with the same vocabulary."""
    folder = tmp_path_factory.mktemp("models") / "draft"
    shape: dict[str, Any] = {"num_hidden_layers": 1, "head_dim": 32, "num_key_value_heads": 1, "hidden_size": 32}
    return make_tiny_model(folder, "Qwen3ForCausalLM", tokenizer=False, seed=5, **shape)


WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "overlapped, chunked": {"overlap": True, "step_tokens": 24, "max_sequences": 8},
    "preempted": {"max_length": 256, "kv_tokens": 256},
    "swapped, overlapped": {"max_length": 256, "kv_tokens": 256, "preemption": "swap", "overlap": True},
}


@pytest.mark.parametrize("way", mostly_long(reversed(WAYS)))
def test_every_draft_is_what_the_draft_model_would_answer(
    way: str, model: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with plain torch, from the text so far: so nothing rejected, evicted or moved is in its cache."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    prompts = prompts_of(1, 10)
    expected = tokens_of(LLM(str(model), progress=False), prompts)
    llm, speculation = drafting(model, other, "draft", **WAYS[way])
    drafted: list[tuple[list[int], list[int]]] = []
    plain = DraftModel.draft

    def watched(self: DraftModel, rows: Any, starts: Any, counts: Any) -> None:
        plain(self, rows, starts, counts)
        for row, start, count in zip(rows, starts, counts, strict=True):
            text = self._rows.tokens[row, : start + count + 1].tolist()
            drafted.append((text[: start + 1], text[start + 1 :]))

    monkeypatch.setattr(DraftModel, "draft", watched)
    assert tokens_of(llm, prompts) == expected
    assert tokens_of(llm, prompts) == expected, "with cache hits"
    assert len(drafted) > 200 and speculation.counts.checks == len(drafted)
    with torch.inference_mode():
        for text, drafts in random.Random(0).sample(drafted, 60):
            logits = reference(torch.tensor([text + drafts])).logits[0]
            assert logits[len(text) - 1 : -1].argmax(-1).tolist() == drafts
    llm.engine.scheduler.check()


def test_a_draft_model_that_is_the_model_itself_is_always_right_greedy_and_sampled(model: Path) -> None:
    prompts = prompts_of(2, 10)
    params = [
        SamplingParams(temperature=0.8 * (i % 3), top_p=0.9, max_tokens=30, ignore_eos=True, seed=i) for i in range(10)
    ]
    expected = tokens_of(LLM(str(model), progress=False), prompts, params)
    llm, speculation = drafting(model, model, "draft")
    assert tokens_of(llm, prompts, params) == expected
    assert speculation.counts.accepted == speculation.counts.drafted, "a seeded choice is drafted with its randomness"
    steps = sum(speculation.counts.drafted) / speculation.counts.checks
    assert steps > 5


def test_the_vocabularies_must_be_the_same(model: Path, tmp_path: Path) -> None:
    small = make_tiny_model(tmp_path, tokenizer=False, vocab_size=320)
    with pytest.raises(SettingsError, match="a vocabulary of 320 tokens and the model 384"):
        LLM(str(model), progress=False, speculation="draft", draft=str(small))


def test_a_draft_model_needs_layers_without_a_window(model: Path, tmp_path: Path) -> None:
    windowed = make_tiny_model(tmp_path, "MistralForCausalLM", tokenizer=False, sliding_window=24)
    with pytest.raises(SettingsError, match="sliding window"):
        LLM(str(model), progress=False, speculation="draft", draft=str(windowed))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"speculation": "draft"}, "draft is not set: speculation draft needs a model"),
        ({"draft": "x"}, "speculation is off and draft is x"),
        ({"speculation": "ngram", "max_drafts": 9}, "max_drafts is 9"),
        ({"acceptance": 0.5}, "acceptance needs drafts"),
        ({"speculation": "ngram", "acceptance": 1.5}, "acceptance is 1.5"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], said: str, model: Path) -> None:
    with pytest.raises(SettingsError, match=said):
        LLM(str(model), progress=False, **settings)


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_drafts_are_accepted_by_chance_for_measurements(chance: float, model: Path) -> None:
    llm = LLM(str(model), progress=False, speculation="ngram", acceptance=chance, fixed_drafts=4)
    tokens_of(llm, prompts_of(3, 10))
    speculation = llm.engine.scheduler.planner.speculation
    assert speculation is not None
    rate = speculation.counts.accepted[0] / speculation.counts.drafted[0]
    assert abs(rate - chance) < 0.15
    assert speculation.counts.drafted[4:] == [0] * 4
