"""Constraint: the seam for grammars and other rules that depend on the tokens chosen so far."""

from __future__ import annotations

from typing import Protocol


class Constraint(Protocol):
    """Limits the next token of one sequence. The engine asks for the mask while the device runs the forward pass.

    A call that raises ends the request with an error; other requests continue.
    """

    def mask(self) -> bytes | None:
        """Return the tokens that may come next, a bit for each id, the lowest bit of the first byte for id 0.

        None allows every token. Bits behind the vocabulary are ignored.
        """
        ...

    def accept(self, token: int) -> None:
        """Advance by a token that was chosen."""
        ...

    def fork(self) -> Constraint:
        """Return an independent copy in the present state, for another sequence."""
        ...
