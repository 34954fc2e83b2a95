"""The scheduler's cost is measured for each length of the queue."""

from __future__ import annotations

from chairlift.costs.scheduler import run, scheduler_table


def test_there_is_a_row_for_each_length_of_the_queue() -> None:
    rows = run(running=3, waiting=(0, 5), warmup=1, steps=5)
    assert [(row.running, row.waiting) for row in rows] == [(3, 0), (3, 5)]
    assert all(row.plan_us > 0 and row.apply_us > 0 for row in rows)
    assert all(row.step_us == row.plan_us + row.apply_us for row in rows)
    assert scheduler_table(rows).row_count == 2
