"""The masks of a step's constrained samples, computed once the tokens before them are known."""

from __future__ import annotations

from chairlift.core.constraint import Constraint, Masker, Masks
from chairlift.core.plan import StepPlan
from chairlift.core.request import Sequence

_NO_TOKENS = bytes(1)  # a mask


def masks_of(step: StepPlan, masker: Masker) -> tuple[Masks, list[tuple[Sequence, Exception]]]:
    """Return the masks of a step's constrained samples, and the sequences with constraints that failed.

    A sample has a mask for each of its drafts, and one for the token behind them. A constraint that fails behind a
    draft allows no token there and is not reported: the draft may be rejected.
    """
    failures: list[tuple[Sequence, Exception]] = []
    drafts = dict(step.drafts)
    places: list[int] = []
    states: list[Constraint | None] = []
    for place in step.masked:
        sequence, own = step.samples[place], drafts.get(place, [])
        try:
            found = _states(sequence, own)
        except Exception as error:
            failures.append((sequence, error))
            found = [None] * (len(own) + 1)
        places += [place] * len(found)
        states += found
    known = [(place, state) for place, state in zip(places, states, strict=True) if state is not None]
    masks = masker.masks([state for _, state in known])
    for number, problem in masks.errors.items():
        place = known[number][0]
        if number and known[number - 1][0] == place:
            masks[number], masks.whole = _NO_TOKENS, None
        else:
            failures.append((step.samples[place], problem))
    if len(known) == len(states):
        return masks, failures
    rest = iter(masks)
    return Masks(None if state is None else next(rest) for state in states), failures


def _states(sequence: Sequence, drafts: list[int]) -> list[Constraint | None]:
    """Return the states of a sequence's constraint before each of its drafts and behind the last; None if it ended."""
    state = sequence.constraint
    if state is None or sequence.is_done:
        return [None] * (len(drafts) + 1)
    found: list[Constraint | None] = [state]
    for token in drafts:
        state = state.fork()
        state.accept(token)  # the planner has cut the drafts that it does not allow
        found.append(state)
    return found
