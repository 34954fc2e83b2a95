"""When Python's garbage collector may stop a process: full collections look at every object, and take that long.

A process that has imported torch holds some 300,000 objects, and a full collection of them takes 0.1 to 0.4 s: longer
than a hundred decode steps. Almost none of these objects ever becomes garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 1 << 30


def freeze_loaded() -> None:
    """Collect once, then leave all that is there now out of later collections. Call it when nothing is in flight."""
    gc.collect()
    gc.freeze()


def postpone_full_collections() -> None:
    """Let Python collect young objects only from now on: full collections are the caller's to time."""
    gc.set_threshold(*gc.get_threshold()[:2], _NEVER)


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Let Python collect young objects only, for as long as this lasts."""
    usual = gc.get_threshold()
    postpone_full_collections()
    try:
        yield
    finally:
        gc.set_threshold(*usual)
