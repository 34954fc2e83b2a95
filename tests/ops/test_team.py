"""Regions of the CPU's threads: every piece runs once, and results do not depend on the number of pieces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from chairlift import LLM, SamplingParams
from chairlift.ops.team import bind, run


@njit(nogil=True)
def _count(counts: np.ndarray, piece: int, pieces: int) -> None:
    counts[piece] += 1
    counts[-1] = pieces


@njit(nogil=True)
def count(pieces: int, counts: np.ndarray) -> None:
    run(pieces, *bind(_count, (counts,)))


@pytest.mark.parametrize("pieces", [1, 2, 7, 16])
def test_every_piece_is_computed_once_in_each_of_many_regions(pieces: int) -> None:
    counts = np.zeros(pieces + 1, np.int64)
    for region in range(1, 501):
        count(pieces, counts)
        assert (counts[:pieces] == region).all()
        assert counts[pieces] == pieces


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
