"""Blocks are counted, shared and given back; and what is wrong with the counts is found out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.blocks import BlockPool, BlockTable


def filled(pool: BlockPool, length: int) -> BlockTable:
    table = BlockTable()
    pool.grow(table, length)
    return table


def test_a_new_pool_is_all_free() -> None:
    pool = BlockPool(5, 4)
    assert (pool.free, pool.owned) == (5, 0)
    pool.check([])


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_tokens_fill_blocks_from_the_first(length: int, blocks: int) -> None:
    pool = BlockPool(5, 4)
    assert pool.blocks_for(length) == blocks
    assert len(filled(pool, length).blocks) == blocks


def test_growing_adds_only_what_is_missing_and_keeps_what_is_there() -> None:
    pool = BlockPool(5, 4)
    table = filled(pool, 5)
    before = list(table.blocks)
    assert pool.missing(table, 8) == 0
    assert pool.missing(table, 9) == 1
    assert pool.missing(table, 17) == 3
    assert pool.grow(table, 9) is None
    assert table.blocks[:2] == before
    assert len(set(table.blocks)) == 3
    assert (pool.free, pool.owned) == (2, 3)


def test_a_table_may_write_to_the_end_of_its_last_block_without_asking() -> None:
    pool = BlockPool(5, 4)
    assert filled(pool, 5).writable == 8


def test_a_block_is_appended_behind_a_full_one_or_one_that_nobody_shares_while_any_is_free() -> None:
    pool = BlockPool(4, 4)
    table = filled(pool, 5)
    assert pool.append(table) and (len(table.blocks), table.writable) == (3, 12)
    twin = pool.fork(table, 9)
    assert not pool.append(table), "the last block is shared, and must be copied first"
    assert pool.grow(twin, 10) is not None and pool.free == 0
    assert not pool.append(twin) and len(twin.blocks) == 3
    pool.check([table, twin])


def test_a_fork_takes_no_block() -> None:
    pool = BlockPool(5, 4)
    table = filled(pool, 6)
    twin = pool.fork(table, 6)
    assert twin.blocks == table.blocks
    assert twin.blocks is not table.blocks
    assert pool.owned == 2
    pool.check([table, twin])


def test_after_a_fork_both_must_ask_and_whoever_writes_first_copies_the_last_block_alone() -> None:
    pool = BlockPool(5, 4)
    table = filled(pool, 6)
    twin = pool.fork(table, 6)
    full, tail = twin.blocks
    assert pool.missing(table, 7) == pool.missing(twin, 7) == 1
    copy = pool.grow(twin, 7)
    assert copy == (tail, twin.blocks[1])
    assert twin.blocks[0] == table.blocks[0] == full
    assert twin.blocks[1] != table.blocks[1] == tail
    assert pool.missing(table, 7) == 0, "alone with it again, the other writes in place"
    assert pool.grow(table, 7) is None
    assert pool.owned == 3
    pool.check([table, twin])


def test_a_copy_and_a_new_block_can_be_needed_at_once() -> None:
    pool = BlockPool(5, 4)
    table = filled(pool, 6)
    twin = pool.fork(table, 6)
    assert pool.missing(twin, 9) == 2
    assert pool.grow(twin, 9) is not None
    assert len(twin.blocks) == 3
    assert pool.owned == 4


def test_a_full_last_block_is_never_copied() -> None:
    pool = BlockPool(5, 4)
    table = filled(pool, 8)
    twin = pool.fork(table, 8)
    assert pool.missing(twin, 9) == 1
    assert pool.grow(twin, 9) is None
    assert twin.blocks[:2] == table.blocks


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(5, 4)
    table = filled(pool, 6)
    twin = pool.fork(table, 6)
    pool.release(table)
    assert (table.blocks, table.writable) == ([], 0)
    assert pool.owned == 2
    pool.release(twin)
    assert pool.free == 5
    pool.check([])


def test_a_released_table_can_grow_again() -> None:
    pool = BlockPool(2, 4)
    table = filled(pool, 8)
    pool.release(table)
    pool.grow(table, 5)
    assert len(table.blocks) == 2
    pool.check([table])


def test_check_finds_a_table_that_nobody_counted() -> None:
    pool = BlockPool(3, 4)
    table = filled(pool, 4)
    stray = BlockTable()
    stray.blocks = list(table.blocks)
    with pytest.raises(AssertionError, match=f"block {table.blocks[0]}: 2 tables hold it, 1 are counted"):
        pool.check([table, stray])


def test_check_finds_a_lost_table() -> None:
    pool = BlockPool(3, 4)
    table = filled(pool, 4)
    with pytest.raises(AssertionError, match=f"block {table.blocks[0]}: 0 tables hold it, 1 are counted"):
        pool.check([])


@pytest.mark.parametrize("harm", ["lost", "twice"])
def test_check_finds_a_free_block_that_is_lost_or_listed_twice(harm: str) -> None:
    pool = BlockPool(3, 4)
    if harm == "lost":
        pool._free.pop()
    else:
        pool._free.append(pool._free[0])
    with pytest.raises(AssertionError, match="no table holds"):
        pool.check([])


@settings(deadline=None)
@given(st.data())
def test_free_and_owned_make_total_and_missing_is_exactly_what_growing_takes(data: st.DataObject) -> None:
    pool = BlockPool(data.draw(st.integers(4, 20)), data.draw(st.integers(1, 4)))
    tables: list[tuple[BlockTable, int]] = []  # with the tokens written
    for _ in range(data.draw(st.integers(1, 30))):
        move = data.draw(st.sampled_from(["new", "grow", "fork", "release"]))
        if move == "new" or not tables:
            tables.append((BlockTable(), 0))
        at = data.draw(st.integers(0, len(tables) - 1))
        table, length = tables[at]
        if move == "release":
            pool.release(table)
            del tables[at]
        elif move == "fork":
            tables.append((pool.fork(table, length), length))
        else:
            longer = length + data.draw(st.integers(1, 6))
            missing, free = pool.missing(table, longer), pool.free
            if missing <= free:
                if longer > table.writable:
                    pool.grow(table, longer)
                tables[at] = table, longer
                assert free - pool.free == missing
                written = table.blocks[length // pool.block_size : pool.blocks_for(longer)]
                others = {block for other, _ in tables if other is not table for block in other.blocks}
                assert others.isdisjoint(written), "a block that is written belongs to one table alone"
        pool.check(table for table, _ in tables)
        assert pool.free + pool.owned == pool.total
