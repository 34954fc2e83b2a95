"""Grouping of decodes with a shared prefix, and how the prefix is cut into items."""

from __future__ import annotations

import numpy as np
import pytest

from chairlift.execution.sharing import MOST_PARTS, Grouping

BLOCK = 16


def tables_of(*prefixes: tuple[int, int], own: int = 4) -> np.ndarray:
    """Return tables of (group, shared blocks) plus `own` blocks each; group -1 shares nothing."""
    width = max(common for _, common in prefixes) + own
    tables = 100_000 + np.arange(len(prefixes) * width, dtype=np.int32).reshape(len(prefixes), width)
    for row, (group, common) in enumerate(prefixes):
        if group >= 0:
            tables[row, :common] = group * 1000 + np.arange(common)
    return tables


def test_a_group_is_found_and_every_token_of_it_is_read_once_for_each_member() -> None:
    tables = tables_of(*[(0, 40)] * 5, (-1, 0), *[(1, 70)] * 9)
    contexts = np.full(len(tables), tables.shape[1] * BLOCK)
    found = Grouping(BLOCK, kv_heads=8, members_of_item=4).find(tables, contexts)
    assert found is not None
    assert found.prefixes.tolist() == [640] * 5 + [0] + [1120] * 9
    read = np.zeros((len(tables), contexts[0]), int)
    for first, count, low, high, part in found.items:
        assert 1 <= count <= 4
        for member in found.members[first : first + count]:
            read[member, low:high] += 1
            assert 0 <= part < found.parts[member]
    for row, prefix in enumerate(found.prefixes):
        assert (read[row, :prefix] == 1).all() and not read[row, prefix:].any()
    assert (found.parts <= MOST_PARTS).all()


def test_sequences_are_grouped_by_their_longest_shared_prefix() -> None:
    tables = tables_of(*[(0, 40)] * 4, *[(1, 40)] * 4)
    tables[:, :2] = [7, 8]  # a system prompt of two blocks
    found = Grouping(BLOCK, 8, 32).find(tables, np.full(8, 44 * BLOCK))
    assert found is not None
    assert found.prefixes.tolist() == [640] * 8


def test_every_sequence_reads_at_least_one_token_by_itself() -> None:
    tables = tables_of(*[(0, 40)] * 4)
    found = Grouping(BLOCK, 8, 32).find(tables, np.array([640, 650, 700, 640]))
    assert found is not None
    assert found.prefixes.tolist() == [624] * 4


@pytest.mark.parametrize(
    ("prefixes", "context"),
    [
        ([(0, 40)] * 3, 704),  # too few
        ([(0, 8)] * 9, 192),  # too short
        ([(0, 20)] * 4 + [(-1, 0)] * 30, 384),  # too small a part of all
        ([(-1, 30)] * 6, 400),
    ],
)
def test_groups_with_small_savings_are_not_formed(prefixes: list[tuple[int, int]], context: int) -> None:
    tables = tables_of(*prefixes)
    assert Grouping(BLOCK, 8, 32).find(tables, np.full(len(tables), context)) is None


def test_a_very_long_prefix_is_cut_into_a_bounded_number_of_parts() -> None:
    tables = tables_of(*[(0, 8000)] * 4)
    found = Grouping(BLOCK, 8, 32).find(tables, np.full(4, 8004 * BLOCK))
    assert found is not None
    assert 4 < found.parts.max() <= MOST_PARTS
