"""Resources that several processes share: a folder for sockets, and files without a name.

A process inherits the descriptor of such a file. A named file could be removed while the server runs (/tmp is cleaned
on many machines), and the next process could not open it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from chairlift.core.errors import ChairliftError


def nameless_file(content: bytes) -> int:
    """Return the descriptor of a new unnamed file.

    >>> read_all(nameless_file(b"shared"))
    b'shared'
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("chairlift")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.pwrite(descriptor, content, 0)
    return descriptor


def read_all(descriptor: int) -> bytes:
    """Return the file's content without moving its position, which all processes share."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def private_folder(path: Path) -> None:
    """Make a folder with access for this user only, unless it exists; raise if another user can write to it."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise ChairliftError(f"{path} is not a folder that only this user can write to: remove it")
