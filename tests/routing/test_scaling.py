"""How many replicas run: by the tokens that wait, within bounds, and without going up and down for one burst."""

from __future__ import annotations

import doctest
import random

from chairlift.routing import scaling
from chairlift.routing.scaling import Load, Scaling


def make(least: int = 1, most: int = 4) -> Scaling:
    return Scaling(least, most, queued_tokens=1000, up_after=5, down_after=60)


def counts(found: Scaling, loads: list[Load], start: float = 0) -> list[int]:
    return [found.count(start + second, load) for second, load in enumerate(loads)]


def test_the_example() -> None:
    assert doctest.testmod(scaling) == (0, 4)


def test_a_short_burst_starts_nothing() -> None:
    loads = [Load(1, 5000, 50, 32)] * 4 + [Load(1, 0, 1, 32)] + [Load(1, 5000, 50, 32)] * 4
    assert set(counts(make(), loads)) == {1}


def test_while_replicas_start_no_further_ones_do() -> None:
    """They will take a part of the queue: the queue of now says nothing of how many are needed with them."""
    found = make()
    assert counts(found, [Load(1, 1500, 20, 32)] * 30)[-1] == 2
    assert counts(found, [Load(1, 9000, 90, 32)] * 30, 30)[-1] == 2
    assert counts(found, [Load(2, 9000, 90, 32)] * 6, 60)[-1] == 4


def test_replicas_with_full_batches_stay_though_nothing_waits() -> None:
    found = make()
    counts(found, [Load(1, 3000, 90, 32)] * 6)
    assert counts(found, [Load(3, 0, 33, 32)] * 300, 6)[-1] == 3, "33 requests are more than half of two batches"
    assert counts(found, [Load(3, 0, 32, 32)] * 61, 400)[-1] == 2


def test_it_ends_at_the_least_number_and_never_leaves_its_bounds() -> None:
    chance, found = random.Random(1), make(2, 3)
    seen = set()
    for second in range(3000):
        is_loaded = second // 200 % 2 == 1
        queued, live = (5000, chance.randint(16, 90)) if is_loaded else (0, chance.randint(0, 15))
        seen.add(found.count(second, Load(chance.randint(1, 3), queued, live, 32)))
    assert seen == {2, 3}
    assert counts(found, [Load(3, 0, 0, 32)] * 200, 3000)[-1] == 2
