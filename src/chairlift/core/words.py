"""Counts with their nouns, for messages and reports."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, singular or plural.

    >>> counted(1, "request"), counted(2000, "token"), counted(2, "batch")
    ('1 request', '2,000 tokens', '2 batches')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 'sh', 's', 'x')) else 's'}"
