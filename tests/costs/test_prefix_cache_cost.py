"""The prefix cache's cost is measured for each number of cached blocks."""

from __future__ import annotations

from dataclasses import asdict

from chairlift.costs.prefix_cache import cost_table, run


def test_there_is_a_row_for_each_number_of_cached_blocks() -> None:
    rows = run((4, 8), prompt=32, repeat=2)
    assert [row.cached for row in rows] == [4, 8]
    assert all(min(row.match_us, row.lock_us, row.insert_us, row.evict_us) > 0 for row in rows)
    assert cost_table([asdict(row) for row in rows]).row_count == 2
