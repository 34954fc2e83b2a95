"""Constraint: the seam for grammars and other rules that depend on the tokens chosen so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.core.step import Bits


class Constraint(ABC):
    """Limits the next token of one sequence. The engine asks for the mask while the device runs the forward pass.

    A call that raises ends the request with an error; other requests continue.
    """

    @abstractmethod
    def mask(self) -> Bits | None:
        """Return the tokens that may come next.

        None allows every token. Bits behind the vocabulary are ignored, and missing ones are 0.
        """

    @abstractmethod
    def accept(self, token: int) -> None:
        """Advance by a token that was chosen."""

    @abstractmethod
    def fork(self) -> Constraint:
        """Return an independent copy in the present state, for another sequence."""

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may come next, one after the other."""
        state, count = self.fork(), 0
        for token in tokens:
            mask = None if state.is_complete else state.mask()
            if state.is_complete or not (mask is None or _allows(mask, token)):
                break
            state.accept(token)
            count += 1
        return count

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow: the sequence ends."""
        return False

    @property
    def pending(self) -> Constraint | None:
        """The constraint with a mask that `mask` must compute first: this one or a part of it."""
        return None


class Masks(list[Bits | None]):
    """Masks of several constraints; `errors` has those that failed, by number."""

    def __init__(self, masks: Iterable[Bits | None] = ()) -> None:
        super().__init__(masks)
        self.errors: dict[int, Exception] = {}
        self.whole: Any = None  # the masks as one array, if they are its rows

    def add(self, constraint: Constraint) -> None:
        """Compute a mask."""
        try:
            self.append(constraint.mask())
        except Exception as error:
            self.errors[len(self)] = error
            self.append(None)


class Masker:
    """Advances the constraints of a step and computes their masks, one by one in this thread."""

    allocate: Callable[[int, int], Any] | None = (
        None  # returns rows of 32-bit words for masks; None: any memory will do
    )

    def accept(self, constraints: Sequence[Constraint], tokens: Sequence[int]) -> None:
        """Advance constraints by a token each before their own `accept` is called, where that is faster."""

    def masks(self, constraints: Sequence[Constraint]) -> Masks:
        """Return the masks, which are valid for the next two calls."""
        found = Masks()
        for constraint in constraints:
            found.add(constraint)
        return found


@dataclass(frozen=True, slots=True)
class Thinking:
    """How an answer's reasoning begins and ends, in token ids."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool = False  # the prompt ends inside the reasoning; else the model may begin one
    budget: int | None = None  # tokens of reasoning at most


class Reasoning(Constraint):
    """Applies a constraint to what follows the reasoning, and bounds the reasoning's length."""

    def __init__(self, thinking: Thinking, inner: Constraint | None) -> None:
        self._thinking = thinking
        self._inner = inner
        self._count = 0  # tokens of reasoning
        self._tail: tuple[int, ...] = ()  # the last tokens, as many as `end` has
        self._forced: tuple[int, ...] = ()  # tokens of `end` that must come next
        self._is_inside = thinking.is_open
        self._may_begin = not thinking.is_open  # at the answer's first tokens
        self._begun: tuple[int, ...] = ()  # tokens of `start` so far
        if self._is_inside:
            self._force()

    def mask(self) -> Bits | None:
        """Return the mask of the part that the answer is in."""
        if self._forced:
            return _bits(self._forced[0])
        if self._is_inside:
            return None
        if not self._may_begin:
            return None if self._inner is None else self._inner.mask()
        if self._begun:
            return _bits(self._thinking.start[len(self._begun)])
        mask = None if self._inner is None else self._inner.mask()
        return None if mask is None else _join(mask, _bits(self._thinking.start[0]))

    def accept(self, token: int) -> None:
        """Advance by a token."""
        if self._is_inside:
            self._think(token)
        elif self._may_begin and token == self._thinking.start[len(self._begun)]:
            self._begun += (token,)
            if self._begun == self._thinking.start:
                self._may_begin, self._is_inside = False, True
                self._force()
        else:
            self._may_begin = False
            if self._inner is not None:
                self._inner.accept(token)

    def _think(self, token: int) -> None:
        end = self._thinking.end
        self._count += 1
        self._forced = self._forced[1:]
        self._tail = (*self._tail, token)[-len(end) :]
        if self._tail == end:
            self._is_inside, self._forced = False, ()
        elif not self._forced:
            self._force()

    def _force(self) -> None:
        """Force the end of the reasoning if its budget is used up."""
        budget = self._thinking.budget
        if budget is not None and self._count >= budget:
            self._forced = self._thinking.end

    def fork(self) -> Reasoning:
        """Return an independent copy."""
        copy = Reasoning(self._thinking, None if self._inner is None else self._inner.fork())
        copy._count, copy._tail, copy._forced = self._count, self._tail, self._forced
        copy._is_inside, copy._may_begin, copy._begun = self._is_inside, self._may_begin, self._begun
        return copy

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        is_active = not self._is_inside and not (self._may_begin and self._begun)
        return is_active and self._inner is not None and self._inner.is_complete

    @property
    def pending(self) -> Constraint | None:
        """The inner constraint, while its mask is used."""
        if self._inner is None or self._forced or self._is_inside or (self._may_begin and self._begun):
            return None
        return self._inner.pending


def _allows(mask: Bits, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _bits(token: int) -> bytes:
    """Return the mask that allows one token."""
    return bytes(token // 8) + bytes([1 << token % 8])


def _join(one: Bits, other: Bits) -> bytes:
    """Return the mask that allows what either allows."""
    size = max(len(one), len(other))
    joined = int.from_bytes(one, "little") | int.from_bytes(other, "little")
    return joined.to_bytes(size, "little")
