"""The waiting line keeps the policy's order, whoever leaves from its middle, and forgets its dead."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.queue import WaitingQueue
from chairlift.core.request import Phase, Request, Sequence


def waiting(order: int, key: float = 0.0, index: int = 0) -> Sequence:
    sequence = Sequence(Request(f"r{order}", [1]), order, 10, index)
    sequence.rank = (key, order, index)
    return sequence


def leave(queue: WaitingQueue, sequence: Sequence) -> None:
    sequence.phase = Phase.DONE
    queue.forget(1)


def pop(queue: WaitingQueue) -> Sequence:
    first = queue.peek()
    assert first is not None
    queue.take(first)
    return first


def drained(queue: WaitingQueue) -> list[int]:
    return [pop(queue).order for _ in range(len(queue))]


def test_the_smallest_rank_goes_first_whenever_it_came() -> None:
    queue = WaitingQueue()
    for order in (3, 1, 2, 0):
        queue.push(waiting(order))
    assert drained(queue) == [0, 1, 2, 3]


def test_the_policys_key_comes_before_the_order_of_arrival_and_siblings_go_by_index() -> None:
    queue = WaitingQueue()
    for sequence in (late := waiting(5, key=1.0), second := waiting(1, 2.0, index=1), first := waiting(1, 2.0)):
        queue.push(sequence)
    assert [pop(queue) for _ in range(3)] == [late, first, second]


def test_peeking_takes_nobody() -> None:
    queue = WaitingQueue()
    queue.push(waiting(0))
    assert queue.peek() is queue.peek()
    assert len(queue) == 1


def test_who_left_from_the_middle_is_neither_counted_nor_served() -> None:
    queue = WaitingQueue()
    sequences = [waiting(order) for order in range(4)]
    for sequence in sequences:
        queue.push(sequence)
    leave(queue, sequences[0])
    leave(queue, sequences[2])
    assert len(queue) == 2
    assert {sequence.order for sequence in queue} == {1, 3}
    assert queue.peek() is sequences[1]
    assert drained(queue) == [1, 3]


def test_the_dead_do_not_pile_up() -> None:
    queue = WaitingQueue()
    queue.push(survivor := waiting(0, key=1.0))
    for order in range(1, 10_000):
        queue.push(sequence := waiting(order))
        leave(queue, sequence)
    assert queue._entries <= 66
    assert drained(queue) == [survivor.order]


def test_the_order_survives_a_clearing_of_the_dead() -> None:
    queue = WaitingQueue()
    sequences = [waiting(order * 37 % 200) for order in range(200)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[:150]:
        leave(queue, sequence)
    assert queue._entries < 150
    assert drained(queue) == sorted(sequence.order for sequence in sequences[150:])


@settings(deadline=None)
@given(st.lists(st.one_of(st.just("pop"), st.just("leave"), st.integers(0, 5)), max_size=300), st.randoms())
def test_it_agrees_with_a_sorted_list(moves: list[str | int], random: object) -> None:
    queue, plain = WaitingQueue(), list[Sequence]()
    for order, move in enumerate(moves):
        if isinstance(move, int):
            queue.push(sequence := waiting(order, key=float(move)))
            plain.append(sequence)
            plain.sort(key=lambda one: one.rank)
        elif plain and move == "pop":
            assert pop(queue) is plain.pop(0)
        elif plain:
            leave(queue, plain.pop(random.randrange(len(plain))))  # type: ignore[attr-defined]
        assert len(queue) == len(plain)
        assert set(queue) == set(plain)
        assert not plain or queue.peek() is plain[0]
