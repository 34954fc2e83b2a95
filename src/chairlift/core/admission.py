"""Admission: the blocks that a waiting group must find available before it is admitted to the batch."""

from __future__ import annotations

from chairlift.core.blocks import BlockPool
from chairlift.core.cache_groups import CacheGroups
from chairlift.core.errors import RequestError
from chairlift.core.prefix_node import Node
from chairlift.core.prefixes import PrefixBinding
from chairlift.core.request import Request, Sequence
from chairlift.core.watermark import Watermark


class Admission:
    """Answers whether a group fits. Groups are looked up in the prefix cache, unless a lookup's path is given."""

    def __init__(self, pool: BlockPool, prefixes: PrefixBinding, groups: CacheGroups) -> None:
        self.watermark = Watermark(pool.total)
        self._pool = pool
        self._groups = groups
        self._prefixes = prefixes

    def check_beams(self, request: Request, limit: int) -> None:
        """Reject a beam search if its beams cannot all be in memory at once: beams run together or not at all."""
        most = request.params.width * self._groups.blocks_of(limit)
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
        length, groups = self.reserved_length(sequence), self._groups
        if groups.is_plain:
            return self._pool.blocks_for(length) - shared
        start = max(sequence.computed, len(path) * groups.block_size)
        # Shared blocks of a group with a window count, too: the sequence passes them soon, and others may keep them.
        return sum(groups.blocks_within(window, length, start) - (0 if window else shared) for window in groups.windows)

    def has_room(self, sequence: Sequence, is_alone: bool, path: list[Node] | None = None) -> bool:
        """Whether a waiting group fits, with the watermark to spare unless nothing runs."""
        spare = 0 if is_alone else self.watermark.blocks
        return self.needs(sequence, path) + spare <= self._pool.available

    def known(self, sequence: Sequence, path: list[Node] | None = None) -> int:
        """Return the number of tokens of a waiting sequence that need not be computed."""
        path = self._prefixes.find(sequence) if path is None else path
        return max(sequence.computed, len(path) * self._pool.block_size)

    def reserved_length(self, sequence: Sequence) -> int:
        """Return the tokens that a sequence gets blocks for when it is admitted: those it has, or all if it is settled.

        Not before it forks: siblings share its blocks, and must not share one that is yet to be written.
        """
        return sequence.limit if sequence.is_settled and sequence.is_forked else len(sequence.tokens)
