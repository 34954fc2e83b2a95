"""Control over Python's full garbage collections, which visit every object and stop the process meanwhile.

A process that has imported torch has some 300,000 objects, and a full collection takes 0.1 to 0.4 s: longer than a
hundred decode steps. Almost none of these objects ever becomes garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 1 << 30


def freeze_loaded() -> None:
    """Collect once, then exclude all present objects from later collections. Call it when no step is in flight."""
    gc.collect()
    gc.freeze()


def postpone_full_collections() -> None:
    """Turn automatic full collections off; the caller decides when to run one."""
    gc.set_threshold(*gc.get_threshold()[:2], _NEVER)


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Turn automatic full collections off inside the block."""
    usual = gc.get_threshold()
    postpone_full_collections()
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@contextmanager
def no_collections() -> Iterator[None]:
    """Turn all automatic collections off inside the block."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
