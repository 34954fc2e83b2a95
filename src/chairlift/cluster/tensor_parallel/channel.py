"""The channel from rank 0 to the other ranks: each message is written once and read by all of them, in order.

On one host it is shared memory, with a pipe to each rank that announces what was written. Ranks on other hosts have
another Sender and Receiver (remote.py).
"""

from __future__ import annotations

import os
import struct
import time
from typing import Protocol

from chairlift.cluster.tensor_parallel.memory import make_memory, map_memory
from chairlift.core.errors import DeviceError

SLOTS, SLOT_BYTES = 8, 1 << 20  # a step of decodes takes some kilobytes, a message of long prompts several slots
_COUNTER = 8  # bytes
_PIECE = struct.Struct("<I?")  # bytes of a piece, and whether it is its message's last
_POLL = 0.0005  # seconds between two looks at the ranks' progress while all slots are in use


class Sender(Protocol):
    """The end of rank 0."""

    def send(self, message: bytes) -> None:
        """Send a message to all other ranks; DeviceError if a rank has ended."""
        ...

    def close(self) -> None:
        """End the channel: ranks that have read all messages get None."""
        ...


class Receiver(Protocol):
    """The end of another rank."""

    def receive(self) -> bytes | None:
        """Wait for the next message; None if rank 0 has closed the channel or has ended."""
        ...


class SharedSender:
    """Writes messages, cut in pieces, to slots of shared memory in rotation."""

    def __init__(self, readers: int) -> None:
        self.descriptor = make_memory(SLOTS * SLOT_BYTES + _COUNTER * readers)
        memory = memoryview(map_memory(self.descriptor))
        self._slots = memory[: SLOTS * SLOT_BYTES]
        self._read = memory[SLOTS * SLOT_BYTES :].cast("Q")  # pieces read so far, by each rank
        self._written = 0
        pipes = [os.pipe() for _ in range(readers)]
        self.bells = [reading for reading, _ in pipes]  # for the rank processes
        self._writing = [writing for _, writing in pipes]
        self.is_broken = False  # set by the thread that watches the ranks: no rank will read again

    def send(self, message: bytes) -> None:
        """Write a message and announce it."""
        for start in range(0, len(message), SLOT_BYTES):
            piece = message[start : start + SLOT_BYTES]
            self._wait_for_slot()
            begin = self._written % SLOTS * SLOT_BYTES
            self._slots[begin : begin + len(piece)] = piece
            self._written += 1
            self._announce(_PIECE.pack(len(piece), start + len(piece) == len(message)))

    def close(self) -> None:
        """Close the pipes."""
        writing, self._writing = self._writing, []
        for each in writing:
            os.close(each)

    def _announce(self, piece: bytes) -> None:
        try:
            for bell in self._writing:
                os.write(bell, piece)  # never blocks: the pipe has room for far more than SLOTS of these
        except BrokenPipeError:
            raise DeviceError("a rank has closed its end of the channel") from None

    def _wait_for_slot(self) -> None:
        while self._written - min(self._read, default=self._written) >= SLOTS:
            if self.is_broken:
                raise DeviceError("a rank does not read its messages")
            time.sleep(_POLL)


class SharedReceiver:
    """Reads the messages of a SharedSender."""

    def __init__(self, descriptor: int, bell: int, number: int) -> None:
        memory = memoryview(map_memory(descriptor))
        self._slots = memory[: SLOTS * SLOT_BYTES]
        self._read = memory[SLOTS * SLOT_BYTES :].cast("Q")
        self._bell, self._number = bell, number  # which of the readers this is

    def receive(self) -> bytes | None:
        """Wait for the next message."""
        pieces = []
        while True:
            announced = os.read(self._bell, _PIECE.size)
            if not announced:
                return None
            length, is_last = _PIECE.unpack(announced)
            begin = self._read[self._number] % SLOTS * SLOT_BYTES
            pieces.append(bytes(self._slots[begin : begin + length]))
            self._read[self._number] += 1  # the slot may be written again
            if is_last:
                return b"".join(pieces)
