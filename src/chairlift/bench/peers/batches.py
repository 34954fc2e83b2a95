"""Padding, for engines that take a batch as one matrix."""

from __future__ import annotations


def pad(batch: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts padded on the left to one length, and the attention mask.

    >>> pad([[5], [6, 7]])
    ([[0, 5], [6, 7]], [[0, 1], [1, 1]])
    """
    longest = max(map(len, batch))
    gaps = [longest - len(prompt) for prompt in batch]
    ids = [[0] * gap + prompt for gap, prompt in zip(gaps, batch, strict=True)]
    return ids, [[0] * gap + [1] * (longest - gap) for gap in gaps]
