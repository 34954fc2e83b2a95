"""Reasoning: a constraint that begins to apply when the reasoning ends, and that ends it in time."""

from __future__ import annotations

import random

import pytest

from chairlift.core.constraint import Constraint, Masker, Reasoning, Thinking

START, END = (1, 2), (3, 4)


def allowed(mask: bytes | None) -> set[int] | None:
    return None if mask is None else {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}


class Digits(Constraint):
    """Allows 10, 11 and 12 in this order."""

    def __init__(self, done: int = 0) -> None:
        self.done = done

    def mask(self) -> bytes | None:
        return (1 << 10 + self.done).to_bytes(2, "little")

    def accept(self, token: int) -> None:
        assert token == 10 + self.done
        self.done += 1

    def fork(self) -> Digits:
        return Digits(self.done)

    @property
    def is_complete(self) -> bool:
        return self.done == 3

    @property
    def pending(self) -> Digits:
        return self


def accept(constraint: Constraint, *tokens: int) -> None:
    for token in tokens:
        mask = allowed(constraint.mask())
        assert mask is None or token in mask, f"{token} is not among {mask}"
        assert not constraint.is_complete
        constraint.accept(token)


def test_what_follows_the_reasoning_is_constrained() -> None:
    constraint = Reasoning(Thinking(START, END), Digits())
    assert allowed(constraint.mask()) == {1, 10}, "it may begin with reasoning, or at once"
    accept(constraint, 1)
    assert allowed(constraint.mask()) == {2} and constraint.pending is None
    accept(constraint, 2)
    assert constraint.mask() is None and constraint.pending is None
    accept(constraint, 7, 3, 3, 4)
    assert allowed(constraint.mask()) == {10} and constraint.pending is not None
    accept(constraint, 10, 11, 12)
    assert constraint.is_complete


def test_an_answer_without_reasoning_is_constrained_from_its_first_token() -> None:
    constraint = Reasoning(Thinking(START, END), Digits())
    accept(constraint, 10)
    assert allowed(constraint.mask()) == {11}, "the reasoning cannot begin later"
    accept(constraint, 11, 12)
    assert constraint.is_complete


def test_a_prompt_may_have_begun_the_reasoning() -> None:
    constraint = Reasoning(Thinking(START, END, is_open=True), Digits())
    assert constraint.mask() is None
    accept(constraint, 10, 1, 2, 3, 4, 10, 11, 12)
    assert constraint.is_complete


@pytest.mark.parametrize("budget", [0, 1, 2, 5])
@pytest.mark.parametrize("is_open", [True, False])
def test_the_budget_forces_the_end(budget: int, is_open: bool) -> None:
    constraint = Reasoning(Thinking(START, END, is_open, budget), None)
    if not is_open:
        accept(constraint, *START)
    accept(constraint, *[7] * budget)
    assert allowed(constraint.mask()) == {3}
    accept(constraint, 3)
    assert allowed(constraint.mask()) == {4}
    accept(constraint, 4)
    assert constraint.mask() is None and not constraint.is_complete
    accept(constraint, 7, 7)


def test_without_a_rule_for_the_answer_only_the_budget_counts() -> None:
    constraint = Reasoning(Thinking(START, END, budget=3), None)
    assert constraint.mask() is None
    accept(constraint, 9, 9, 9, 9)
    assert constraint.mask() is None


@pytest.mark.parametrize("seed", range(30))
def test_a_fork_goes_its_own_way_from_the_same_state(seed: int) -> None:
    rng = random.Random(seed)
    constraint: Constraint = Reasoning(Thinking(START, END, rng.random() < 0.5, rng.choice([None, 0, 3, 6])), Digits())
    for _ in range(20):
        fork = constraint.fork()
        mask = allowed(constraint.mask())
        assert allowed(fork.mask()) == mask and fork.is_complete == constraint.is_complete
        if constraint.is_complete:
            return
        token = rng.choice(sorted(mask) if mask else [1, 2, 3, 4, 7, 3, 4])
        constraint.accept(token)
        assert allowed(fork.mask()) == mask, "the fork has not moved"
        fork.accept(token)
        constraint = rng.choice([constraint, fork])


def test_a_mask_that_cannot_be_computed_is_the_error_of_its_own_sequence() -> None:
    class Broken(Digits):
        def mask(self) -> bytes | None:
            raise ValueError("no")

    found = Masker().masks([Digits(), Broken()])
    assert isinstance(found[0], bytes) and found[1] is None
    assert [(number, type(error)) for number, error in found.errors.items()] == [(1, ValueError)]
