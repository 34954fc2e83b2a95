"""Regions of the CPU's threads: every piece is computed once, whoever computes it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from chairlift import LLM, SamplingParams
from chairlift.ops.team import Team, bind, run


@njit(nogil=True)
def _count(counts: np.ndarray, rounds: int, piece: int, pieces: int) -> None:
    total = 0
    for i in range(rounds):
        total += i % 7
    counts[piece] += 1 + (total < 0)
    counts[-1] = pieces


@njit(nogil=True)
def count(state: int, pieces: int, counts: np.ndarray, rounds: int) -> None:
    run(state, pieces, *bind(_count, (counts, rounds)))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rounds", [0, 2000])
def test_every_piece_is_computed_once_in_each_of_many_regions(rounds: int) -> None:
    team, counts = Team(), np.zeros(17, np.int64)
    for region in range(1, 2001):
        state, pieces = team.call()
        assert (state != 0, pieces) == (True, 16)
        count(state, pieces, counts, rounds)
        assert (counts[:16] == region).all()
        assert counts[16] == 16


@pytest.mark.usefixtures("threads")
def test_two_engines_threads_can_use_the_team_at_once() -> None:
    team, wrong = Team(), []

    def work() -> None:
        counts = np.zeros(17, np.int64)
        for region in range(1, 1001):
            count(*team.call(), counts, 500)
            if not (counts[:16] == region).all():
                wrong.append(region)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert not wrong


def test_a_single_thread_needs_no_team() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert Team().call() == (0, 1)
    finally:
        torch.set_num_threads(before)


def test_threads_that_sleep_are_woken_and_the_process_ends_with_them_in_any_state() -> None:
    script = """
import time, torch, numpy as np
torch.set_num_threads(3)
from chairlift.ops.dense import Dense
from chairlift.ops.linear import Linear
layer, x = Linear(Dense(torch.randn(64, 64))), torch.randn(5, 64)
first = layer(x)
for pause in (0.0, 0.02, 0.2):
    time.sleep(pause)
    assert torch.equal(layer(x), first)
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_answers_do_not_depend_on_the_number_of_threads(tiny_model: Path) -> None:
    prompts = [[5, 6, 7, 8] * 9, [9, 10], [11] * 30]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True, logprobs=2)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([each.outputs[0] for each in LLM(str(tiny_model), progress=False).generate(prompts, params)])
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
