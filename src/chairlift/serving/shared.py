"""What several processes share: a folder for sockets, and files without a name.

A process inherits the descriptor. A file with a name could be removed by others while the server runs (/tmp is cleaned
on many machines), and the next process would not find it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from chairlift.core.errors import ChairliftError


def nameless_file(content: bytes) -> int:
    """Return the descriptor of a new file.

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
    """Return what is in the file; its position, which all processes have in common, does not move."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def private_folder(path: Path) -> None:
    """Make a folder that only this user may enter, unless it is there; another user's in its place is an error."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise ChairliftError(f"{path} is not a folder of this user's alone: remove it")
