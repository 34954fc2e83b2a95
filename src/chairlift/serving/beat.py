"""Beat: the engine's heartbeat, a time in shared memory."""

from __future__ import annotations

import mmap
from array import array

from chairlift.serving.shared import nameless_file

PATIENCE = 4.0  # seconds; the shortest silence after which an engine counts as stuck


class Beat:
    """The engine writes it at least twice a second when idle and once a step when busy; any process may read it.

    It is memory, not a message, because an engine that hangs in a step while it holds the interpreter's lock cannot
    send. Times are of the system's monotonic clock, which all processes share.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        fresh = array("d", [0.0, PATIENCE]).tobytes()
        self.descriptor = nameless_file(fresh) if descriptor is None else descriptor
        memory = mmap.mmap(self.descriptor, 16)
        # A store through this view is atomic. struct.pack_into clears its target first: a process that read at that
        # moment would see time 0, a very long silence.
        self._numbers = memoryview(memory).cast("d")

    def touch(self, now: float, patience: float) -> None:
        """Record that the engine runs at `now`; its next beat may take up to `patience` seconds."""
        self._numbers[1] = patience
        self._numbers[0] = now

    def silence(self, now: float) -> float:
        """Return the seconds since the last beat."""
        return now - self._numbers[0]

    @property
    def patience(self) -> float:
        """Seconds of silence after which the engine counts as stuck."""
        return self._numbers[1]
