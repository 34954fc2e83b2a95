"""Memory-mapped weight files: pages are read from disk when a tensor is first used."""

import mmap
from pathlib import Path

from chairlift.core.errors import ModelError

REFETCH = "delete it and fetch it again"

LFS_POINTER = b"version https://git-lfs"


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file; tensors over it keep the mapping alive, and writes to them never reach the disk."""
    try:
        if path.stat().st_size == 0:  # before opening: opening a pipe would wait for a writer
            raise ModelError(f"{path} is empty: the download did not start; {REFETCH}")
        with path.open("rb") as file:
            # Copy-on-write, since torch warns about read-only buffers.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as problem:
        raise ModelError(f"{path} cannot be read: {problem.strerror or problem}") from problem
    if data[: len(LFS_POINTER)] == LFS_POINTER:
        raise ModelError(f"{path} is a Git LFS pointer and not the weights: run `git lfs pull` in its folder")
    return data


def release(data: mmap.mmap, start: int, count: int) -> None:
    """Drop the whole pages of a part of a mapped file from memory; they are read again when they are used again."""
    page = mmap.PAGESIZE
    first, last = -(-start // page) * page, (start + count) // page * page
    if last > first and hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED, first, last - first)
