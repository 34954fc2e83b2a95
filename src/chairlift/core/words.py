"""Counts in words, for messages and reports that people read."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number with its noun in the right form.

    >>> counted(1, "request"), counted(2000, "token"), counted(2, "batch")
    ('1 request', '2,000 tokens', '2 batches')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 'sh', 's', 'x')) else 's'}"
