"""Constraints: masks that need the token before, with a real model, beside logits processors that do the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.core.constraint import Constraint
from chairlift.core.request import FinishReason, Request
from chairlift.ops.masks import forbid_, pack_masks


class NoRepeat(Constraint):
    """Forbids every token that is in the answer already, and the ids that follow these."""

    def __init__(self, vocabulary: int, chosen: tuple[int, ...] = (), fails_at: int = -1) -> None:
        self.vocabulary, self.chosen, self.fails_at = vocabulary, chosen, fails_at

    def mask(self) -> bytes | None:
        if len(self.chosen) == self.fails_at:
            raise ValueError("no rule applies here")
        if not self.chosen:
            return None
        bits = np.ones(self.vocabulary, np.uint8)
        bits[forbidden(self.chosen, self.vocabulary)] = 0
        return np.packbits(bits, bitorder="little").tobytes()

    def accept(self, token: int) -> None:
        self.chosen += (token,)

    def fork(self) -> NoRepeat:
        return NoRepeat(self.vocabulary, self.chosen, self.fails_at)


def forbidden(chosen: Any, vocabulary: int) -> list[int]:
    return [(token + i) % vocabulary for token in chosen for i in range(2)]


def answers(llm: LLM, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
    """The tokens of each answer; a request that failed has the error's place marked by -1."""
    found: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        llm.engine.submit(request)
    while llm.engine.has_work:
        for event in llm.engine.step():
            tokens = found.setdefault((event.sequence.request.id, event.sequence.index), [])
            assert -1 not in tokens, "nothing comes behind an end"
            if event.token is not None:
                tokens.append(event.token)
            if event.finish_reason is FinishReason.ERROR:
                assert event.error is not None and "no rule applies here" in event.error
                tokens.append(-1)
    pool = llm.engine.scheduler.pool
    assert pool.available == pool.total
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0}, {"temperature": 1.0, "top_k": 20, "n": 3}, {"temperature": 0.8, "logprobs": 2}],
    ids=["greedy", "sampled", "scored"],
)
def test_masks_choose_what_a_logits_processor_would(tiny_model: Path, overlap: bool, asked: dict[str, Any]) -> None:
    llm = LLM(str(tiny_model), progress=False, overlap=overlap, max_length=96)
    vocabulary = llm.engine.scheduler.limits.vocab_size
    prompts = [[5, 6, 7, 8], list(range(20, 60)), [9]]

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(
            0, torch.tensor(forbidden(output, vocabulary), dtype=torch.int64, device=logits.device), -torch.inf
        )

    common = {"max_tokens": 12, "ignore_eos": True, "seed": 7, **asked}
    free = SamplingParams(**common)
    params = [SamplingParams(**common, logits_processors=[process])] * 3 + [free] * 3
    expected = llm.generate(2 * prompts, params, progress=False)  # one batch: a GPU's sums depend on the batch size
    requests = [
        Request(f"r{i}", prompt, free, seed=7, constraint=NoRepeat(vocabulary)) for i, prompt in enumerate(prompts)
    ]
    requests += [Request(f"free{i}", prompt, free, seed=7) for i, prompt in enumerate(prompts)]
    found = answers(llm, requests)
    for request, output in zip(requests, expected, strict=True):
        for j, answer in enumerate(output.outputs):
            assert found[request.id, j] == answer.token_ids


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlapped"])
def test_a_constraint_that_fails_ends_its_request_alone(tiny_model: Path, overlap: bool) -> None:
    llm = LLM(str(tiny_model), progress=False, overlap=overlap, max_length=96)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    vocabulary = llm.engine.scheduler.limits.vocab_size
    failing = Request("failing", [5, 6], params, constraint=NoRepeat(vocabulary, fails_at=3))
    found = answers(llm, [failing, Request("other", [7, 8], params)])
    assert len(found["failing", 0]) == 4 and found["failing", 0][-1] == -1
    assert len(found["other", 0]) == 6


@pytest.mark.parametrize("vocabulary", [8, 13, 64])
def test_a_mask_is_a_bit_for_each_token(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    allowed = rng.random((3, vocabulary)) < 0.5
    masks: list[bytes | None] = [np.packbits(row, bitorder="little").tobytes() for row in allowed]
    masks += [None, b"\x01", masks[0] + b"\xff\xff"]  # all; what a short one does not name is forbidden
    expected = np.vstack([allowed, np.ones(vocabulary, bool), np.arange(vocabulary) == 0, allowed[0]])
    logits = torch.zeros(6, vocabulary)
    forbid_(logits, pack_masks(masks, vocabulary))
    assert np.array_equal(logits.numpy() == 0, expected)
