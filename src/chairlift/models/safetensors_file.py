"""Reader of safetensors files: a JSON header with the location of each tensor, then the tensors.

The safetensors package is not used: sizes must be checked here anyway, for errors that users can act on, and then a
tensor is a view of the mapped file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.core.errors import ModelError
from chairlift.core.values import is_name, show
from chairlift.models.mapped import REFETCH, map_file, release

if TYPE_CHECKING:
    import torch

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
    "BOOL": ("bool", 1),
}
"""The torch name and the bytes of each dtype."""

MAX_HEADER = 32 << 20
"""Bytes, several times the header of 100,000 tensors; a sparse file can have any size, so its size is no bound."""
MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's location in the file."""

    dtype: str  # its name in torch
    itemsize: int
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.itemsize


class SafetensorsFile:
    """An open safetensors file: `tensors` is parsed at once, weights by `read`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        header, start = self._header()
        self.tensors = {name: self._locate(name, entry, start) for name, entry in header.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored: a view of the file, not a copy."""
        import torch

        stored = self.tensors[name]
        dtype: torch.dtype = getattr(torch, stored.dtype)
        if stored.nbytes == 0:  # torch.frombuffer rejects an empty buffer
            return torch.empty(stored.shape, dtype=dtype)
        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=stored.nbytes, offset=stored.offset)
        if stored.offset % stored.itemsize:  # the format does not guarantee alignment, kernels expect it
            raw = raw.clone()
        return raw.view(dtype).view(stored.shape)

    def release(self, name: str) -> None:
        """Drop a tensor's pages of the mapped file from memory; they are read again when they are used again."""
        stored = self.tensors[name]
        release(self._data, stored.offset, stored.nbytes)

    def _header(self) -> tuple[dict[str, Any], int]:
        """Return the tensors' descriptions, and the offset of the data."""
        size = len(self._data)
        start = 8 + int.from_bytes(self._data[:8], "little")
        if start > size:
            raise ModelError(
                f"{self.path}: the header ends at byte {start} but the file has {size}: "
                f"it is not a safetensors file or the download is incomplete; {REFETCH}"
            )
        if start > MAX_HEADER:
            raise ModelError(
                f"{self.path}: the header has {start:,} bytes where at most {MAX_HEADER:,} are read: "
                f"the file is damaged; {REFETCH}"
            )
        try:
            header = json.loads(self._data[8:start])
        except (ValueError, RecursionError) as problem:
            raise ModelError(f"{self.path}: the header is not JSON: the file is damaged; {REFETCH}") from problem
        if not isinstance(header, dict):
            raise ModelError(f"{self.path}: the header names no tensors: the file is damaged; {REFETCH}")
        header.pop("__metadata__", None)
        return header, start

    def _locate(self, name: str, entry: Any, start: int) -> StoredTensor:
        """Check a tensor's description against the format and the file's size."""
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
                begin >= 0 and is_name(name) and self._can_have(shape)
            ):
                pass
            case _:
                raise ModelError(
                    f"{self.path}: tensor {show(name)} has an invalid description: the file is damaged; {REFETCH}"
                )
        if dtype not in DTYPES:
            raise ModelError(f"{self.path}: tensor {name!r} has type {show(dtype)}; supported are {', '.join(DTYPES)}")
        stored = StoredTensor(*DTYPES[dtype], tuple(shape), start + begin)
        if stored.nbytes != end - begin:
            raise ModelError(
                f"{self.path}: tensor {name!r} has {show(end - begin)} bytes, but {dtype} of shape {show(shape)} "
                f"needs {show(stored.nbytes)}: the file is damaged; {REFETCH}"
            )
        if start + end > len(self._data):
            raise ModelError(
                f"{self.path}: tensor {name!r} ends at byte {start + end} but the file has {len(self._data)}: "
                f"the download is incomplete; {REFETCH}"
            )
        return stored

    def _can_have(self, shape: list[Any]) -> bool:
        """Whether the shape is possible in this file; the size check does not bound the shape of an empty tensor."""
        if len(shape) > MAX_DIMENSIONS or not all(type(length) is int and length >= 0 for length in shape):
            return False
        return 0 not in shape or math.prod(max(length, 1) for length in shape) <= len(self._data)
