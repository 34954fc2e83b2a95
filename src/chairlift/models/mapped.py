"""A weights file in memory without reading it: pages come from disk when a tensor is first used."""

import mmap
from pathlib import Path

from chairlift.core.errors import ModelError

REFETCH = "delete it and fetch it again"

LFS_POINTER = b"version https://git-lfs"


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file; tensors over it stay valid as long as they live, and writes to them never reach the disk."""
    try:
        if path.stat().st_size == 0:  # before it is opened: opening a pipe waits for a writer
            raise ModelError(f"{path} is empty: the download never began; {REFETCH}")
        with path.open("rb") as file:
            # Copy-on-write and not read-only: torch warns about buffers it may not write to.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as problem:
        raise ModelError(f"{path} cannot be read: {problem.strerror or problem}") from problem
    if data[: len(LFS_POINTER)] == LFS_POINTER:
        raise ModelError(f"{path} is a Git LFS pointer and not the weights: run `git lfs pull` in its folder")
    return data
