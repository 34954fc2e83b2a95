"""CacheLayout: the group of layers that each layer's KV belongs to, and its place in a block of that group.

Layers with the same cache spec are in groups of equal size, so that a block of any group takes the same memory and one
pool serves all. A group may have unused places. Models with equal layers have one group of all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chairlift.models.blocks import CacheSpec

_WASTE = 6  # unused places may be one in so many of all layers: fewer and larger groups take less time per step


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a decoder's layers; those that attend to all tokens are first."""

    windows: tuple[int, ...]  # of each group
    width: int  # layers in a block
    groups: list[int]  # of each layer
    slots: list[int]  # of each layer: its place in the blocks of its group

    @staticmethod
    def of(specs: list[CacheSpec]) -> CacheLayout:
        """Put layers in groups.

        >>> from chairlift.models.blocks import CacheSpec
        >>> CacheLayout.of([CacheSpec(1, 64, window) for window in (8, 0, 8, 0)])
        CacheLayout(windows=(0, 8), width=2, groups=[1, 0, 1, 0], slots=[0, 0, 1, 1])
        """
        alike: dict[int, list[int]] = {}  # layers by window
        for layer, spec in enumerate(specs):
            alike.setdefault(spec.window, []).append(layer)
        kinds = sorted(alike, key=lambda window: (window > 0, -window))
        width = _width([len(alike[kind]) for kind in kinds])
        groups, slots = [0] * len(specs), [0] * len(specs)
        windows: list[int] = []
        for kind in kinds:
            for place, layer in enumerate(alike[kind]):
                groups[layer], slots[layer] = len(windows) + place // width, place % width
            windows += [kind] * -(-len(alike[kind]) // width)
        return CacheLayout(tuple(windows), width, groups, slots)


def _width(counts: list[int]) -> int:
    """Return the layers of a group, for so many layers of each kind, of which the first keeps the most tokens.

    The first kind has no unused places: in long sequences nearly all memory is its own.
    """
    layers = sum(counts)
    fitting = (width for width in range(counts[0], 0, -1) if counts[0] % width == 0)
    return next(w for w in fitting if (sum(-(-count // w) * w for count in counts) - layers) * _WASTE <= layers)
