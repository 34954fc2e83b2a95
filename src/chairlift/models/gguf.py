"""Reader of GGUF, the one-file model format: typed metadata, then tensors in block formats (see ops/block_formats.py).

Every length and count in the file is checked against the file's size and against limits of real models before memory is
allocated for it: a truncated, damaged or hostile file raises a `ModelError` and nothing else.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.core.errors import ModelError
from chairlift.core.values import is_name, show
from chairlift.models.cut import Cut
from chairlift.models.mapped import REFETCH, map_file, release
from chairlift.ops.block_formats import FORMATS, UNSUPPORTED, BlockFormat

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4

# Several times the counts of any real model. A sparse file can have any size at no cost, so only these limits bound the
# memory of its header, to some hundreds of megabytes.
MAX_TENSORS = 1 << 17
MAX_ENTRIES = 1 << 16
MAX_ELEMENTS = 1 << 22  # in all arrays together: tokens, token types, scores, merges
MAX_HEADER = 1 << 26  # bytes

STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The struct code of each numeric metadata type."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's location in the file; the shape is in torch's order, the last dimension contiguous."""

    name: str
    shape: tuple[int, ...]
    type: BlockFormat
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.type.values * self.type.nbytes


class GgufFile:
    """An open GGUF file: `metadata` and `tensors` are parsed at once, weights by `read`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_bytes = 0  # of tensors, as they are stored
        self._data = map_file(path)
        header = _Header(path, self._data)
        tensor_count, metadata_count = header.counts()
        self.metadata = header.entries(metadata_count)
        infos = [header.tensor() for _ in range(tensor_count)]
        start = header.data_start(self.metadata.get("general.alignment", 32))
        self.tensors = self._place(infos, start)
        release(self._data, 0, header.at)

    def read_metadata(self) -> dict[str, Any]:
        """Read the metadata again, for users of a vocabulary, which takes tens of megabytes."""
        header = _Header(self.path, self._data)
        _, count = header.counts()
        found = header.entries(count)
        release(self._data, 0, header.at)
        return found

    def read(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        cut: Cut | None = None,
    ) -> torch.Tensor:
        """Read a tensor's weights, by default as float32; quantized bytes are dequantized on the device.

        Of a part, the bytes of whole blocks are read: columns that begin or end within a block are cut after that.

        >>> file = GgufFile(resolve("smollm2-135m"))  # doctest: +SKIP
        >>> file.read("output_norm.weight").shape  # doctest: +SKIP
        torch.Size([576])
        """
        import torch

        from chairlift.ops.block_codes import dequantize

        blocks, rest = self.blocks(name, cut)
        form = self.tensors[name].type
        shape = (blocks.shape[0], blocks.shape[1] * form.values)[: len(self.tensors[name].shape)]
        weights = dequantize(blocks.view(-1).to(device), form, dtype or torch.float32).view(shape)
        return weights if rest is None else rest.of(weights)

    def blocks(self, name: str, cut: Cut | None = None) -> tuple[torch.Tensor, Cut | None]:
        """Return a tensor's bytes [rows, blocks, bytes of a block], a view of the mapped file unless columns are cut.

        The second value is what to cut from the weights of these blocks, if they have further columns.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path} has no tensor {name}: the file is not a whole model of its architecture")
        import torch

        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.offset)
        blocks, rest = raw.view(tensor.shape[0], -1, tensor.type.nbytes), None
        if cut is not None:
            of_blocks, rest = cut.in_blocks(tensor.type.values)
            blocks = of_blocks.of(blocks)
        self.read_bytes += blocks.nbytes
        return blocks, rest

    def release(self, name: str) -> None:
        """Drop a tensor's pages of the mapped file from memory; they are read again when they are used again."""
        tensor = self.tensors[name]
        release(self._data, tensor.offset, tensor.nbytes)

    def _place(self, infos: list[GgufTensor], start: int) -> dict[str, GgufTensor]:
        """Convert offsets in the data section to offsets in the file, and check them against its size."""
        tensors: dict[str, GgufTensor] = {}
        size = len(self._data)
        for info in infos:
            tensor = GgufTensor(info.name, info.shape, info.type, start + info.offset)
            end = tensor.offset + tensor.nbytes
            if end > size:
                raise ModelError(
                    f"{self.path}: tensor {tensor.name} ends at byte {end} but the file has {size}: "
                    f"the download is incomplete; {REFETCH}"
                )
            if tensor.offset % 8 or tensor.name in tensors:
                wrong = (
                    "appears twice"
                    if tensor.name in tensors
                    else f"begins at byte {tensor.offset}, which is not aligned"
                )
                raise ModelError(f"{self.path}: tensor {tensor.name} {wrong}: the file is damaged; {REFETCH}")
            tensors[tensor.name] = tensor
        return tensors


class _Header:
    """A cursor over the header that cannot pass the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.elements = 0

    def counts(self) -> tuple[int, int]:
        """Check magic and version; return the numbers of tensors and metadata entries."""
        magic = self.data[:4]
        if magic != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: it begins with {magic!r} and not with {MAGIC!r}")
        self.at = 4
        (version,) = self.numbers("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = f"big-endian GGUF version {swapped}" if swapped in VERSIONS else f"GGUF version {version}"
            raise ModelError(f"{self.path} is {kind}; little-endian versions 2 and 3 are read: fetch a newer file")
        tensors, entries = self.numbers("QQ")
        self.limit(tensors, MAX_TENSORS, "tensors")
        self.limit(entries, MAX_ENTRIES, "metadata entries")
        return tensors, entries

    def entries(self, count: int) -> dict[str, Any]:
        """Read the metadata."""
        found: dict[str, Any] = {}
        for _ in range(count):
            key, value = self.entry()
            if key in found:
                raise self.damaged(f"metadata key {show(key)} for the second time")
            found[key] = value
        return found

    def entry(self) -> tuple[str, Any]:
        """Read a metadata entry."""
        key = self.string()
        (kind,) = self.numbers("I")
        if kind in NUMBERS:
            return key, self.numbers(NUMBERS[kind])[0]
        if kind == STRING:
            return key, self.string()
        if kind == ARRAY:
            return key, self.array()
        raise self.damaged(f"metadata type {kind} of {show(key)}")

    def tensor(self) -> GgufTensor:
        """Read a tensor's description; its offset is relative to the data section."""
        name = self.string()
        if not is_name(name):
            raise self.damaged(f"tensor name {show(name)}")
        (rank,) = self.numbers("I")
        if rank > MAX_DIMENSIONS:
            raise self.damaged(f"{rank} dimensions of tensor {name}")
        shape = self.numbers(f"{rank}Q")[::-1]
        kind, offset = self.numbers("IQ")
        form = FORMATS.get(kind)
        if form is None:
            supported = ", ".join(each.name for each in FORMATS.values())
            raise ModelError(
                f"{self.path}: tensor {name} has type {UNSUPPORTED.get(kind, kind)}, which is not supported; "
                f"use a file quantized with {supported} (for example Q4_K_M)"
            )
        if 0 in shape or not shape or shape[-1] % form.values:
            raise self.damaged(f"shape {shape} of {form.name} tensor {name}")
        return GgufTensor(name, shape, form, offset)

    def data_start(self, alignment: object) -> int:
        """Return the offset of the data section, after the header and its padding."""
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self.damaged(f"alignment {show(alignment)}")
        return -(-self.at // alignment) * alignment

    def numbers(self, codes: str) -> tuple[Any, ...]:
        """Read numbers, packed without padding."""
        start = self.skip(struct.calcsize(f"<{codes}"))
        return struct.unpack_from(f"<{codes}", self.data, start)

    def string(self) -> str:
        """Read a string: its length, then UTF-8."""
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Read strings; this loop runs hundreds of thousands of times, so it uses local variables."""
        data, at, size = self.data, self.at, min(len(self.data), MAX_HEADER)
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > size:
                    raise self.too_long(at)
                strings.append(data[start:at].decode())
        except struct.error as problem:
            raise self.cut_off() from problem
        except UnicodeDecodeError as problem:
            raise self.damaged(f"string which ends at byte {at} and is not UTF-8") from problem
        self.at = at
        return strings

    def array(self) -> list[Any]:
        """Read an array: the type of its elements, their number, the elements."""
        kind, count = self.numbers("IQ")
        self.elements += count
        self.limit(self.elements, MAX_ELEMENTS, "elements in arrays")
        if kind == STRING:
            return self.strings(count)
        if kind not in NUMBERS:
            raise self.damaged(f"array elements of type {kind}")
        return list(self.numbers(f"{count}{NUMBERS[kind]}"))

    def skip(self, count: int) -> int:
        """Skip `count` bytes, which must exist; return the offset of the first."""
        start = self.at
        self.at = start + count
        if self.at > min(len(self.data), MAX_HEADER):
            raise self.too_long(self.at)
        return start

    def limit(self, count: int, most: int, what: str) -> None:
        """Raise for a count above any real model's, before memory is allocated for it."""
        if count > most:
            raise self.damaged(f"{count:,} {what} where at most {most:,} are read")

    def too_long(self, end: int) -> ModelError:
        """Return the error for a header that extends past the file's end or past MAX_HEADER."""
        return self.cut_off() if end > len(self.data) else self.damaged(f"a header of more than {MAX_HEADER:,} bytes")

    def cut_off(self) -> ModelError:
        """Return the error for a file that ends inside its header."""
        return ModelError(
            f"{self.path}: the header goes on past the file's {len(self.data)} bytes: "
            f"the download is incomplete; {REFETCH}"
        )

    def damaged(self, what: str) -> ModelError:
        """Return the error for an impossible value in the header."""
        return ModelError(f"{self.path}: {what}, before byte {self.at}: the file is damaged; {REFETCH}")
