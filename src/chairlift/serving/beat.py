"""Beat: a few bytes of shared memory in which the engine says when it was last alive."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_PACKED = struct.Struct("dd")
PATIENCE = 4.0  # seconds without a sign of life, at least, before an engine counts as stuck


class Beat:
    """The engine touches it at least twice a second when idle and once a step when busy; any process may look.

    Memory and not a message: an engine that is stuck in a step, holding the interpreter's lock, sends nothing. The
    clock is the system's monotonic one, which all processes share.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_PACKED.pack(0.0, PATIENCE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _PACKED.size)

    def touch(self, now: float, patience: float) -> None:
        """The engine is alive now, and its next sign may take that long."""
        _PACKED.pack_into(self._memory, 0, now, patience)

    def silence(self, now: float) -> float:
        """Seconds since the last sign."""
        last, _ = _PACKED.unpack_from(self._memory)
        return float(now - last)

    @property
    def patience(self) -> float:
        """Seconds of silence that still are no reason to worry."""
        _, patience = _PACKED.unpack_from(self._memory)
        return float(patience)
