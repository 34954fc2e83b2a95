"""Paged attention: prompt chunks, decodes and both mixed, against a dense computation in float64."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from pages import PIECES, Pages

from chairlift.ops.attention import paged_attention, paged_attention_reference
from chairlift.ops.scoring import Scoring


@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 2, 80)])
def test_it_matches_dense_attention(
    heads: int, kv_heads: int, dim: int, pieces: list[tuple[int, int]], window: int
) -> None:
    pages = Pages(pieces, heads, kv_heads, dim)
    exact = pages.dense(window)
    for attend in (paged_attention, paged_attention_reference):
        assert (pages.attend(window, attend) - exact).abs().max() < 3e-6


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_scale_soft_cap_and_sinks_match(pieces: list[tuple[int, int]], has_sinks: bool, capped: bool) -> None:
    scoring = Scoring(0.5, 5.0 if capped else 0.0, torch.tensor([-1.0, 0.5, 2.0, 7.0]) if has_sinks else None)
    pages = Pages(pieces, 4, 2, 32)
    for attend in (paged_attention, paged_attention_reference):
        assert (pages.attend(20, attend, scoring) - pages.dense(20, scoring)).abs().max() < 5e-6


@pytest.mark.parametrize("block_size", [32, 48])
def test_larger_blocks_work_too(block_size: int) -> None:
    pages = Pages(PIECES["all mixed"], 4, 2, 32, block_size)
    assert (pages.attend() - pages.dense(0)).abs().max() < 3e-6


def test_a_head_size_without_a_tile_uses_the_reference() -> None:
    pages = Pages(PIECES["all mixed"], 4, 2, 24)
    assert (pages.attend() - pages.dense(0)).abs().max() < 3e-6


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=6), st.integers(0, 50))
def test_any_mix_of_slices_matches(pieces: list[tuple[int, int]], window: int) -> None:
    pages = Pages(pieces, 6, 2, 16)
    assert (pages.attend(window) - pages.dense(window)).abs().max() < 3e-6


def test_extreme_scores_stay_finite() -> None:
    pages = Pages([(40, 3)], 4, 2, 32)
    pages.q *= 1000
    answer = pages.attend()
    assert torch.isfinite(answer).all()
    # Scores in the thousands have errors of thousandths, which shift weight between nearly equal scores.
    assert (answer - pages.dense(0)).abs().max() < 1e-2


def test_a_token_has_the_same_bits_in_any_chunk_and_any_batch() -> None:
    pages = Pages([(0, 60), (90, 1)], 6, 3, 64)
    whole = pages.attend()
    every = pages.q
    for first, last in ((0, 1), (0, 16), (17, 23), (59, 60)):
        pages.batch = pages.of(np.arange(first, last), [0, last - first], [last], pages.batch.host.tables[:1])
        pages.q = every[first:last]
        assert torch.equal(pages.attend(), whole[first:last])
