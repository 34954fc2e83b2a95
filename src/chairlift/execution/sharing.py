"""Groups of decodes that begin with the same blocks, so that attention reads these blocks once per group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_LEAST_TOKENS = 256  # of a group's shared prefix
_LEAST_MEMBERS = 4
_WORTH = 0.2  # share of all reads: a smaller saving is not worth another kernel in each layer
_PROGRAMS = 528  # approximate number of programs for the shared reads
_ALIGNED = 64  # tokens per iteration of a program
MOST_PARTS = 16  # of one group's prefix


class HostSharedPrefixes(NamedTuple):
    """The arrays of ops.batch.SharedPrefixes, in host memory."""

    items: np.ndarray
    members: np.ndarray
    prefixes: np.ndarray
    parts: np.ndarray


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups decodes by their common prefix of blocks."""

    block_size: int
    kv_heads: int
    members_of_item: int  # sequences with queries in one item of attention

    def find(self, tables: np.ndarray, contexts: np.ndarray) -> HostSharedPrefixes | None:
        """Group decodes by their tables [decodes, blocks]; None if that saves too little.

        Tables with the same block at the same place have the same blocks before it, so one place is enough to find
        common prefixes. Each decode keeps at least one token outside the prefix.
        """
        place = _LEAST_TOKENS // self.block_size - 1
        whole = (contexts - 1) // self.block_size  # blocks that may be shared
        able = np.flatnonzero(whole > place)
        if able.size < _LEAST_MEMBERS:
            return None
        _, which, counts = np.unique(tables[able, place], return_inverse=True, return_counts=True)
        groups = [able[which == group] for group in np.flatnonzero(counts >= _LEAST_MEMBERS)]
        prefixes = np.zeros(contexts.size, np.int32)
        for group in groups:
            prefixes[group] = _common(tables[group, : whole[group].min()]) * self.block_size
        saved = sum(int(prefixes[group[0]]) * (len(group) - 1) for group in groups)
        if saved < _WORTH * contexts.sum():
            return None
        return self._cut(groups, prefixes)

    def _cut(self, groups: list[np.ndarray], prefixes: np.ndarray) -> HostSharedPrefixes:
        """Cut the shared prefixes into items of about the same size."""
        most = self.members_of_item
        reads = sum(int(prefixes[group[0]]) * -(-len(group) // most) for group in groups)
        usual = -(-reads * self.kv_heads // _PROGRAMS)
        parts = np.zeros(prefixes.size, np.int32)
        items: list[tuple[int, int, int, int, int]] = []
        begun = 0
        for group in groups:
            prefix = int(prefixes[group[0]])
            size = -(-max(usual, _LEAST_TOKENS, -(-prefix // MOST_PARTS)) // _ALIGNED) * _ALIGNED
            lows = range(0, prefix, size)
            parts[group] = len(lows)
            for first in range(0, len(group), most):
                count = min(most, len(group) - first)
                items += ((begun + first, count, low, min(low + size, prefix), i) for i, low in enumerate(lows))
            begun += len(group)
        return HostSharedPrefixes(np.array(items, np.int32), np.concatenate(groups).astype(np.int32), prefixes, parts)


def _common(tables: np.ndarray) -> int:
    """Return the number of leading columns that are equal in all rows."""
    same = (tables == tables[0]).all(0)
    return same.size if same.all() else int(same.argmin())
