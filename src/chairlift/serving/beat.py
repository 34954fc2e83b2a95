"""Beat: a few bytes of shared memory in which the engine says when it was last alive."""

from __future__ import annotations

import mmap
from array import array

from chairlift.serving.shared import nameless_file

PATIENCE = 4.0  # seconds without a sign of life, at least, before an engine counts as stuck


class Beat:
    """The engine touches it at least twice a second when idle and once a step when busy; any process may look.

    Memory and not a message: an engine that is stuck in a step, holding the interpreter's lock, sends nothing. The
    clock is the system's monotonic one, which all processes share.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        fresh = array("d", [0.0, PATIENCE]).tobytes()
        self.descriptor = nameless_file(fresh) if descriptor is None else descriptor
        memory = mmap.mmap(self.descriptor, 16)
        # Numbers that are stored whole. Not struct.pack_into: it clears its target first, and a process that looked
        # just then would see an engine that has been silent since the beginning of time.
        self._numbers = memoryview(memory).cast("d")

    def touch(self, now: float, patience: float) -> None:
        """The engine is alive now, and its next sign may take that long."""
        self._numbers[1] = patience
        self._numbers[0] = now

    def silence(self, now: float) -> float:
        """Seconds since the last sign."""
        return now - self._numbers[0]

    @property
    def patience(self) -> float:
        """Seconds of silence that still are no reason to worry."""
        return self._numbers[1]
