"""Open model files that claim huge counts, and print the growth of peak memory for each.

test_damaged.py runs this in a process of its own. The files are small on disk: the large ones are sparse.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import damage
from gguf import GGUFValueType

from chairlift import LLM
from chairlift.core.errors import ChairliftError

MIB = 1 << 20
SPARSE = 150 * MIB
COUNT = GGUFValueType.UINT32


def header(tensors: int, entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)


def array(kind: int, count: int) -> bytes:
    """Return the start of a GGUF file up to the first element of its one metadata entry, an array."""
    return header(0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, count)


def sparse(path: Path, start: bytes) -> Path:
    """Write a sparse file that begins with `start`."""
    path.write_bytes(start)
    with path.open("rb+") as file:
        file.truncate(SPARSE)
    return path


def cases(scratch: Path) -> Iterator[tuple[str, Path]]:
    metadata, tensors = damage.gguf_models(scratch)[0]
    folder = damage.model_folders(scratch)[0]

    def gguf(key: str, value: int) -> Path:
        damage.write_gguf(scratch / "m.gguf", metadata | {f"llama.{key}": (COUNT, value)}, tensors)
        return scratch / "m.gguf"

    def config(**changed: object) -> Path:
        (scratch / "m").mkdir(exist_ok=True)
        for name, content in folder.items():
            (scratch / "m" / name).write_bytes(content)
        changed = json.loads(folder["config.json"]) | changed
        (scratch / "m" / "config.json").write_text(json.dumps(changed))
        return scratch / "m"

    yield "block_count of 50 million", gguf("block_count", 50_000_000)
    yield "block_count of 9,999", gguf("block_count", 9_999)
    yield "context_length of 4 billion", gguf("context_length", 2**32 - 1)
    for kind, what in ((0, "bytes"), (10, "64-bit numbers"), (8, "strings")):
        count = SPARSE // (1 if kind == 0 else 8) - 100
        yield f"an array of {count:,} {what}", sparse(scratch / "a.gguf", array(kind, count))
    yield "2**60 metadata entries", sparse(scratch / "a.gguf", header(0, 2**60))
    yield "2**60 tensors", sparse(scratch / "a.gguf", header(2**60, 0))
    yield "a key of 140 MiB", sparse(scratch / "a.gguf", header(0, 1) + struct.pack("<Q", 140 * MIB))
    yield "50 million layers", config(num_hidden_layers=50_000_000)
    yield "9,999 layers", config(num_hidden_layers=9_999)
    yield "a vocabulary of 16 million", config(vocab_size=1 << 24)
    yield "2**40 positions", config(max_position_embeddings=2**40)
    folder_of_holes = config()
    sparse(folder_of_holes / "model.safetensors", struct.pack("<Q", 140 * MIB))
    yield "a safetensors header of 140 MiB", folder_of_holes
    sparse(folder_of_holes / "config.json", b"{")
    yield "a config of 150 MiB", folder_of_holes


def peak() -> int:
    """Return this process's peak memory in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main(scratch: Path) -> None:
    scratch.mkdir()
    damage.write_gguf(scratch / "sound.gguf", *damage.gguf_models(scratch)[0])
    LLM(str(scratch / "sound.gguf"), progress=False)  # so that memory that every model needs is allocated before
    grown = {}
    for name, path in cases(scratch):
        before = peak()
        try:
            LLM(str(path), progress=False)
        except ChairliftError as error:
            assert "\n" not in str(error)
        else:
            raise AssertionError(f"{name} was loaded")
        grown[name] = peak() - before
    print(json.dumps(grown))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
