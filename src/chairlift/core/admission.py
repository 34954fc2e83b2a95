"""Admission: the blocks that a waiting group must find available before it is admitted to the batch."""

from __future__ import annotations

from chairlift.core.blocks import BlockPool
from chairlift.core.errors import RequestError
from chairlift.core.prefix_cache import Node
from chairlift.core.prefixes import PrefixBinding
from chairlift.core.request import Request, Sequence
from chairlift.core.watermark import Watermark

# A sequence that was preempted so often reserves all the memory it can need when it is resumed, and is not preempted
# again.
MAX_PREEMPTIONS = 3


class Admission:
    """Answers whether a group fits. Groups are looked up in the prefix cache, unless a lookup's path is given."""

    def __init__(self, pool: BlockPool, prefixes: PrefixBinding) -> None:
        self.watermark = Watermark(pool.total)
        self._pool = pool
        self._prefixes = prefixes

    def check_beams(self, request: Request, limit: int) -> None:
        """Refuse a beam search whose beams could not all be in memory at once: they run together or not at all."""
        most = request.params.width * self._pool.blocks_for(limit)
        if request.params.use_beam_search and most > self._pool.total:
            raise RequestError(
                f"{request.params.width} beams of up to {limit} tokens may take {most} KV blocks and there are "
                f"{self._pool.total}: lower n, best_of or max_tokens"
            )

    def needs(self, sequence: Sequence, path: list[Node] | None = None) -> int:
        """Return the available blocks that a waiting group takes when admitted; `path` is its first sequence's."""
        own = self._needs(sequence, self._prefixes.find(sequence) if path is None else path)
        look_up = self._prefixes.find if path is None else self._prefixes.look_up
        # Beams may share blocks, which are then counted twice: all beams fit side by side (check_beams).
        others = (each for each in sequence.group.members if each is not sequence)
        return own + sum(self._needs(each, look_up(each)) for each in others)

    def _needs(self, sequence: Sequence, path: list[Node]) -> int:
        shared = len(path)
        while shared and not ((block := path[shared - 1].block) >= 0 and self._pool.is_held(block)):
            shared -= 1  # no running sequence holds this block, so it is one of those available
        return self._pool.blocks_for(self.reserved_length(sequence)) - shared

    def has_room(self, sequence: Sequence, is_alone: bool, path: list[Node] | None = None) -> bool:
        """Whether a waiting group fits, with the watermark to spare unless nothing runs."""
        spare = 0 if is_alone else self.watermark.blocks
        return self.needs(sequence, path) + spare <= self._pool.available

    def known(self, sequence: Sequence, path: list[Node] | None = None) -> int:
        """Return the number of tokens of a waiting sequence that need not be computed."""
        path = self._prefixes.find(sequence) if path is None else path
        return max(sequence.computed, len(path) * self._pool.block_size)

    def is_settled(self, sequence: Sequence) -> bool:
        """Whether a sequence has been preempted so often that it has all its memory and is not preempted again.

        Beams never have: they fork at every token, so none of them can own the blocks that it will need.
        """
        return sequence.preemptions >= MAX_PREEMPTIONS and not sequence.is_search

    def reserved_length(self, sequence: Sequence) -> int:
        """Return the tokens that a sequence gets blocks for when it is admitted: those it has, or all if it is settled.

        Not before it forks: siblings share its blocks, and must not share one that is yet to be written.
        """
        return sequence.limit if self.is_settled(sequence) and sequence.is_forked else len(sequence.tokens)
