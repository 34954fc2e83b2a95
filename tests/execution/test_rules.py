"""Rules of many requests, applied at once, have the effect of each alone, in a constant number of operations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chairlift.core.params import SamplingParams
from chairlift.core.request import Request
from chairlift.core.step import Newcomer
from chairlift.execution.rules import Rules

VOCABULARY, MAX_ROWS, LENGTH = 50, 70, 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def no_waiting() -> Iterator[None]:
    """On a GPU, make any operation that synchronizes an error."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def place(rules: Rules, request: Request, rows: list[int]) -> None:
    """Assign these rows to a request's sequences."""
    for index, row in enumerate(rows):
        rules.place(Newcomer(row, index, list(request.prompt), [], request.sampling))


def ruled_alone(logits: torch.Tensor, request: Request, tokens: list[int]) -> torch.Tensor:
    """Apply one row's rules to its logits, word by word."""
    params, logits = request.params, logits.clone()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if params.allowed_token_ids:
        logits[[token for token in range(VOCABULARY) if token not in params.allowed_token_ids]] = -torch.inf
    if len(tokens) < len(request.prompt) + params.min_tokens:
        logits[list(request.stop_ids)] = -torch.inf
    for *begun, last in request.bad_words:
        if len(begun) <= len(tokens) and tokens[len(tokens) - len(begun) :] == begun:
            logits[last] = -torch.inf
    return logits


def make_request(draw: random.Random) -> Request:
    def ids(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    given: dict[str, Any] = {"max_tokens": 100}
    if draw.random() < 0.4:
        given["logit_bias"] = {token: draw.uniform(-5, 5) for token in ids(5)}
    if draw.random() < 0.3:
        given["allowed_token_ids"] = ids(20)
    if draw.random() < 0.5:
        given |= {"min_tokens": draw.randrange(10), "stop_token_ids": ids(3)}
    few = [draw.randrange(4) for _ in range(3)]  # few ids, so that rows do end with the start of a word
    words = tuple(tuple(draw.choice(few) for _ in range(draw.randint(1, 5))) for _ in range(draw.choice((0, 0, 3, 30))))
    return Request("r", [0] * draw.randint(1, 6), SamplingParams(**given), bad_words=words)


@pytest.mark.parametrize("seed", range(20))
def test_rules_of_many_requests_at_once_equal_those_of_each_alone(seed: int) -> None:
    draw = random.Random(seed)
    tokens = torch.tensor([[draw.randrange(4) for _ in range(LENGTH)] for _ in range(MAX_ROWS)], dtype=torch.int32)
    rules = Rules(tokens.to(DEVICE), VOCABULARY)
    free, owner = list(range(MAX_ROWS)), {}
    draw.shuffle(free)
    for _ in range(12):
        request = make_request(draw)
        rows = [free.pop() for _ in range(draw.randint(1, 5))]
        place(rules, request, rows)
        owner |= dict.fromkeys(rows, request)
    for _ in range(6):
        rows = np.array(draw.sample(sorted(owner), draw.randint(1, len(owner))))
        start = np.array([draw.randint(len(owner[row].prompt), 20) for row in rows.tolist()])
        for later in range(3):  # as in a decoding batch: later steps reuse the first step's preparation
            positions = start + later
            logits = torch.randn(rows.size, VOCABULARY)
            known = [tokens[row, :position].tolist() for row, position in zip(rows, positions, strict=True)]
            pairs = zip(logits, rows.tolist(), known, strict=True)
            expected = torch.stack([ruled_alone(each, owner[row], before) for each, row, before in pairs])
            given = logits.to(DEVICE)
            with no_waiting():
                rules.apply_(given, rows, positions)
            assert torch.equal(given.cpu(), expected)
        row = draw.choice(sorted(owner))  # another request gets the row
        owner[row] = make_request(draw)
        place(rules, owner[row], [row])


class Operations(TorchDispatchMode):
    """Counts torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(rows: int, ids: int) -> int:
    """Count the operations of a step for a request with `rows` answers and `ids` words, stop tokens and biases."""
    rules = Rules(torch.zeros(MAX_ROWS, LENGTH, dtype=torch.int32), VOCABULARY)
    params = SamplingParams(
        logit_bias=dict.fromkeys(range(ids), 1.0), stop_token_ids=list(range(ids)), min_tokens=20, max_tokens=40
    )
    words = tuple((0, token) for token in range(ids))
    place(rules, Request("r", [1, 2, 3], params, bad_words=words), list(range(rows)))
    counted = 0
    for position in (5, 6):
        with Operations() as operations:
            rules.apply_(torch.zeros(rows, VOCABULARY), np.arange(rows), np.full(rows, position))
        counted = operations.count
    return counted


def test_a_step_takes_as_many_operations_for_many_words_and_answers_as_for_one() -> None:
    assert operations(rows=63, ids=VOCABULARY) == operations(rows=1, ids=1) < 40
