"""A thread that shares the work of linear layers: the same bits, whatever it does and whenever it stops."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from chairlift import LLM, SamplingParams
from chairlift.ops import assistant as shared
from chairlift.ops.assistant import Assistant, claim, finish, take_item, use_assistant
from chairlift.ops.block_formats import FORMATS
from chairlift.ops.blocks import Blocks
from chairlift.ops.dense import Dense
from chairlift.ops.norm import Norm
from chairlift.ops.weight import SILU, Fused, Weight


@contextmanager
def an_assistant(replacement: Any = None) -> Iterator[None]:
    """Use the assistant, or something in its place."""
    before = shared._assistant
    shared._assistant = replacement or before
    use_assistant(True)
    try:
        yield
    finally:
        use_assistant(False)
        shared._assistant = before


class Stalled(Assistant):
    """An assistant that takes the first items of every region and stops before it stores them."""

    def share(self, kernel: Callable[..., None], items: int, *arguments: Any) -> None:
        self._region += 1
        board = np.zeros(items + 1, np.int64)
        board[0] = self._region << 24
        for _ in range(min(items, 3)):
            assert take_item(board, self._region, items, False) >= 0
        kernel(board, self._region, items, True, *arguments)


class Late(Assistant):
    """An assistant that runs every region once more after the caller has left it."""

    def share(self, kernel: Callable[..., None], items: int, *arguments: Any) -> None:
        super().share(kernel, items, *arguments)
        kernel(self._board, self._region, items, False, *arguments)
        self._board[0] = self._region << 24  # as if it had read the counter before the last item was taken
        kernel(self._board, self._region, items, False, *arguments)


def weights() -> Iterator[tuple[str, Weight]]:
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in ((960, 576), (70, 32), (2, 64)):
        yield f"float32 {outputs}", Dense(torch.randn(outputs, inputs, generator=generator))
    yield "bfloat16", Dense(torch.randn(100, 576, generator=generator).bfloat16(), torch.float32)
    form = next(each for each in FORMATS.values() if each.name == "Q8_0")
    raw = torch.randint(0, 256, (960, 18, form.nbytes), dtype=torch.uint8, generator=generator)
    raw[:, :, :2] = torch.full((960, 18, 1), 0.02).half().view(torch.uint8)
    yield "Q8_0", Blocks(raw, form)


WEIGHTS = dict(weights())


@pytest.mark.parametrize("helper", [Assistant, Stalled, Late])
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 7, 64, 400])
def test_a_shared_product_has_the_same_bits(helper: type[Assistant], name: str, rows: int) -> None:
    weight, generator = WEIGHTS[name], torch.Generator().manual_seed(rows)
    outputs, inputs = weight.shape
    x = torch.randn(rows, inputs, generator=generator).numpy()
    norm, bias = Norm(torch.randn(inputs, generator=generator), 1e-5), torch.randn(outputs, generator=generator)
    residual = torch.randn(rows, outputs, generator=generator).numpy()
    for fused in (Fused(None, None, None), Fused(norm, bias, None), Fused(norm, None, SILU)):
        product = weight.prepare(fused)
        add_to = None if fused.gate else residual
        alone = product(x, None if add_to is None else add_to.copy())
        with an_assistant(helper()):
            for _ in range(5):
                assert np.array_equal(product(x, None if add_to is None else add_to.copy()), alone)


def test_both_threads_take_items() -> None:
    helper, seen = Assistant(), np.zeros(2, np.int64)
    for _ in range(100):
        helper.share(_count, 50, seen)
    assert seen.sum() >= 5000
    assert seen.min() > 0


@njit(nogil=True)
def _count(board: np.ndarray, region: int, items: int, leads: bool, seen: np.ndarray) -> None:
    item = take_item(board, region, items, leads)
    while item >= 0:
        total = 0
        for i in range(100_000):
            total ^= i * item
        if claim(board, region, item):
            seen[1 if leads else 0] += 1 + (total == -1)
            finish(board, region, item)
        item = take_item(board, region, items, leads)


def test_one_thread_alone_stores_an_item() -> None:
    board = np.zeros(3, np.int64)
    board[0] = 5 << 24
    assert take_item(board, 5, 2, False) == 0
    assert claim(board, 5, 0)
    assert not claim(board, 5, 0), "it is being stored"
    finish(board, 5, 0)
    assert not claim(board, 5, 0), "it is stored"
    assert not claim(board, 4, 0), "that region has ended"
    assert take_item(board, 4, 2, False) == -1
    assert take_item(board, 5, 2, False) == 1
    assert take_item(board, 5, 2, False) == -1, "the caller alone takes up what others have begun"
    assert take_item(board, 5, 2, True) == 1


def test_a_result_stored_late_does_not_mark_the_next_regions_item() -> None:
    board = np.zeros(2, np.int64)
    board[0] = 1 << 24
    assert take_item(board, 1, 1, False) == 0
    assert claim(board, 1, 0)
    board[0] = 2 << 24  # the caller was interrupted, and has begun another region
    assert take_item(board, 2, 1, True) == 0
    assert claim(board, 2, 0)
    finish(board, 2, 0)
    finish(board, 1, 0)  # the assistant's, of the first
    assert take_item(board, 2, 1, True) == -1, "the item is stored, and would be computed again"


def test_the_caller_waits_for_a_result_that_is_being_stored() -> None:
    board = np.zeros(2, np.int64)
    board[0] = 1 << 24
    assert take_item(board, 1, 1, False) == 0
    assert claim(board, 1, 0)
    stored: list[float] = []

    def store() -> None:
        time.sleep(0.2)
        stored.append(time.monotonic())
        finish(board, 1, 0)

    thread = threading.Thread(target=store)
    thread.start()
    assert take_item(board, 1, 1, True) == -1
    assert stored, "it came back before the item was stored"
    thread.join()


def test_a_sandbox_that_forbids_to_choose_cores_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: int, _cores: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")  # as under systemd's SystemCallFilter=~@resources

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    product, x = WEIGHTS["float32 960"].prepare(Fused(None, None, None)), np.ones((3, 576), np.float32)
    with an_assistant(Assistant()):
        assert product(x).shape == (3, 960)


def test_several_callers_take_turns() -> None:
    product, x = WEIGHTS["float32 960"].prepare(Fused(None, None, None)), np.ones((30, 576), np.float32)
    alone, wrong = product(x), []

    def call() -> None:
        wrong.extend(i for i in range(50) if not np.array_equal(product(x), alone))

    with an_assistant():
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_answers_do_not_depend_on_the_assistant(tiny_model: Any) -> None:
    prompts, params = [[5, 6, 7, 8] * 9, [9, 10], [11] * 30], SamplingParams(temperature=0, max_tokens=20, logprobs=2)
    llm = LLM(str(tiny_model), progress=False)
    alone = [each.outputs[0] for each in llm.generate(prompts, params)]
    with an_assistant():
        assert [each.outputs[0] for each in llm.generate(prompts, params)] == alone
