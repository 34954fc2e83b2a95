"""EAGLE-3 heads: their drafts are those of the head in plain torch, and they change no answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from chairlift.core.errors import ChairliftError
from chairlift.execution.head_drafts import HeadDrafts
from drafts import drafting, prompts_of, tokens_of
from eagle3 import Reference, make_head, train_head
from tiny import make_tiny_model

LAYERS = (2, 4, 5)  # of a model with 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    return make_tiny_model(folder, tokenizer=False, spread_norms=True, num_hidden_layers=8)


class Watch:
    """What a head drafted, and behind which tokens."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.drafted: list[tuple[list[int], list[int]]] = []
        plain = HeadDrafts.draft

        def watched(drafts: HeadDrafts, rows: Any, starts: Any, counts: Any) -> None:
            plain(drafts, rows, starts, counts)
            for row, start, count in zip(rows, starts, counts, strict=True):
                text = drafts._rows.tokens[row, : start + count + 1].tolist()
                self.drafted.append((text[: start + 1], text[start + 1 :]))

        patch.setattr(HeadDrafts, "draft", watched)

    def compare(self, reference: Reference, count: int = 40) -> None:
        for text, drafts in random.Random(0).sample(self.drafted, count):
            assert reference.drafts(text, len(drafts)) == drafts


HEADS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "of the whole vocabulary": ({}, LAYERS),
    "of a part of the vocabulary": ({"draft_vocab": 100, "prefix": "layers.0."}, LAYERS),
    "with the norm before the residual": ({"norm_before_residual": True}, LAYERS),
    "of other layers": ({"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}, (0, 3, 7)),
    "of other layers' outputs": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}, (1, 4, 7)),
    "with another size and its own embedding": ({"hidden_size": 48, "target_hidden_size": 64}, LAYERS),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if "part" not in name else []) for name in HEADS]
)
def test_drafts_are_those_of_plain_torch(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, layers = HEADS[name]
    head = make_head(tmp_path / "head", model, seed=3, **config)
    prompts, watch = prompts_of(1, 10), Watch(monkeypatch)
    llm, speculation = drafting(model, head, "eagle3")
    tokens_of(llm, prompts)
    assert len(watch.drafted) == speculation.counts.checks > 100
    watch.compare(Reference.of(head, model, layers))


@pytest.mark.long
def test_a_last_prompt_token_that_a_chunk_leaves_is_drafted_behind_as_any_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, watch = make_head(tmp_path / "head", model, seed=3), Watch(monkeypatch)
    llm, _ = drafting(model, head, "eagle3", step_tokens=24, max_sequences=1)
    prompt = [*range(5, 30)]
    tokens_of(llm, [prompt], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    text, drafts = watch.drafted[0]
    assert text == prompt
    assert Reference.of(head, model, LAYERS).drafts(text, len(drafts)) == drafts


class Trained:
    """A head that was trained on the greedy answers to some prompts, so that many of its drafts are accepted."""

    def __init__(self, model: Path, head: Path) -> None:
        self.model, self.head, self.prompts = model, make_head(head, model, seed=7), prompts_of(2, count=6)
        self.answers = tokens_of(LLM(str(model), progress=False), self.prompts)
        train_head(self.head, model, self.prompts, self.answers, LAYERS)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(model, tmp_path_factory.mktemp("heads") / "head")


WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "overlapped, chunked": {"overlap": True, "step_tokens": 24, "max_sequences": 8},
    "preempted": {"max_length": 144, "kv_tokens": 144},
    "preempted, without a prefix cache": {"max_length": 144, "kv_tokens": 144, "prefix_cache": False},
    "swapped, overlapped": {"max_length": 144, "kv_tokens": 144, "preemption": "swap", "overlap": True},
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_trained_head_is_right_often_and_changes_no_token(
    way: str, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts are those of plain torch whatever was accepted, evicted, moved or cached before."""
    watch = Watch(monkeypatch)
    llm, speculation = drafting(trained.model, trained.head, "eagle3", **WAYS[way])
    assert tokens_of(llm, trained.prompts) == trained.answers
    counts = speculation.counts
    assert sum(counts.drafted) > sum(counts.accepted) > 40
    assert tokens_of(llm, trained.prompts) == trained.answers, "with cache hits"
    assert counts.checks == len(watch.drafted)
    assert (llm.engine.scheduler.counters.preemptions > 0) == ("kv_tokens" in WAYS[way])
    watch.compare(Reference.of(trained.head, trained.model, LAYERS), 20)
    llm.engine.scheduler.check()


@pytest.mark.long
def test_forks_and_samples_have_the_answers_that_they_have_without_drafts(trained: Trained) -> None:
    params = [
        SamplingParams(
            temperature=0.3 * (i % 3),
            max_tokens=30,
            ignore_eos=True,
            seed=i,
            n=1 + 2 * (i % 2),
            presence_penalty=i / 10,
        )
        for i in range(6)
    ]
    params[3] = SamplingParams(temperature=0, max_tokens=30, logprobs=2, prompt_logprobs=1, min_tokens=9, seed=1)
    expected = tokens_of(LLM(str(trained.model), progress=False), trained.prompts, params)
    llm, speculation = drafting(trained.model, trained.head, "eagle3")
    assert tokens_of(llm, trained.prompts, params) == expected
    assert sum(speculation.counts.accepted) > 20


def rewrite(head: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> None:
    """Change values of a head's config, and tensors; None deletes one."""
    values = json.loads((head / "config.json").read_text()) | (config or {})
    (head / "config.json").write_text(json.dumps(values))
    found = load_file(head / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, head / "model.safetensors")


WRONG: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], str]] = {
    "vocabulary": ({"vocab_size": 400}, {}, "vocab_size is 400: the model has 384 tokens"),
    "layers": ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2: heads of one layer"),
    "activation": ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu'"),
    "KV heads": ({"num_key_value_heads": 4}, {}, "4 KV heads of 16 elements, where the model has 2 of 16"),
    "states": ({"target_hidden_size": 128}, {}, "target_hidden_size is 128: the model's states have 64"),
    "no embedding": ({"hidden_size": 48, "target_hidden_size": 64}, {}, "without embed_tokens.weight"),
    "a layer too high": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 8]},
        {},
        "name 3 layers of the model, which has 8",
    ),
    "two layers": ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, {}, "name 3 layers"),
    "no layers": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "only heads that read 3 layers"),
    "drafts": ({"draft_vocab_size": 500}, {}, "draft_vocab_size is 500: use a whole number from 1 to 384"),
    "no fc": ({}, {"fc.weight": None}, "lacks fc.weight"),
    "no d2t": ({}, {"d2t": None}, "lacks d2t"),
    "unknown": ({}, {"midlayer.self_attn.q_norm.weight": torch.ones(16)}, "midlayer.self_attn.q_norm.weight, which"),
    "shape": ({}, {"norm.weight": torch.ones(63)}, r"norm.weight has shape \(63,\), but the config implies \(64,\)"),
    "ids": ({}, {"d2t": torch.full((100,), 300)}, "leads to tokens 300 to 399, but the model has 384"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(name: str, model: Path, tmp_path: Path) -> None:
    config, tensors, said = WRONG[name]
    head = make_head(tmp_path / "head", model, draft_vocab=100)
    rewrite(head, config, **tensors)
    with pytest.raises(ChairliftError, match=said):
        LLM(str(model), progress=False, speculation="eagle3", draft=str(head))


def test_a_head_needs_a_model_with_a_few_layers_and_without_windows(model: Path, tmp_path: Path) -> None:
    for number, (architecture, config, said) in enumerate(
        [
            ("LlamaForCausalLM", {"num_hidden_layers": 2}, "name 3 layers of the model, which has 2; without it"),
            ("MistralForCausalLM", {"sliding_window": 24, "num_hidden_layers": 8}, "sliding window"),
        ]
    ):
        other = make_tiny_model(tmp_path / f"model{number}", architecture, tokenizer=False, **config)
        head = make_head(tmp_path / f"head{number}", other)
        with pytest.raises(ChairliftError, match=said):
            LLM(str(other), progress=False, speculation="eagle3", draft=str(head))


def test_a_speculators_config_is_read(model: Path, tmp_path: Path) -> None:
    """The layer's sizes are nested there."""
    head = make_head(tmp_path / "head", model, draft_vocab=100, prefix="layers.0.")
    layer = json.loads((head / "config.json").read_text())
    outer = {"speculators_model_type": "eagle3", "draft_vocab_size": 100, "norm_before_residual": True}
    (head / "config.json").write_text(json.dumps(outer | {"transformer_layer_config": layer}))
    llm, _ = drafting(model, head, "eagle3")
    found = llm.engine._executor.drafts._head.config  # type: ignore[attr-defined]
    assert (found.vocab_size, found.keeps_norm, found.layers) == (100, True, LAYERS)
