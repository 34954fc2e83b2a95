"""layout_of: a digest that is equal for two engines if a block of one means the same in the other."""

from __future__ import annotations

import hashlib
from pathlib import Path

from chairlift.core.errors import SettingsError
from chairlift.execution.build import Built
from chairlift.execution.exchange import BlockExchange

_PAGES, _PAGE = 256, 4096  # read of each file with weights: a fine-tuned model differs in nearly all of them


def layout_of(built: Built, model: str) -> str:
    """Return a digest of a model's weights and of the layout of its KV blocks."""
    blocks, config = exchange_of(built), built.config
    parts = (blocks.shape, str(blocks.dtype), blocks.is_transposed, built.capacity.block_size, config.architecture)
    digest = hashlib.sha256(repr(parts).encode())
    if built.checkpoint is None:
        digest.update(f"dummy {model} {config.layers} {config.hidden_size}".encode())
    else:
        path = Path(built.checkpoint.path)
        found = [path] if path.is_file() else sorted((*path.glob("*.safetensors"), *path.glob("*.gguf")))
        for file in found:
            _add(digest, file)
    return digest.hexdigest()


def exchange_of(built: Built) -> BlockExchange:
    """Return the exchange of an engine's blocks; raise a SettingsError if it cannot have one."""
    if built.exchange is None:
        raise SettingsError(
            "--role and --kv-store need tensor_parallel 1: each of several ranks has only its part of a block"
        )
    if not built.capacity.groups.is_plain:
        raise SettingsError(
            "--role and --kv-store do not work with this model yet: its layers with a sliding window have blocks of "
            "their own; leave them out"
        )
    if built.engine.scheduler.memory.prefix_cache is None:
        raise SettingsError("--role and --kv-store need the prefix cache: leave --no-prefix-cache out")
    return built.exchange


def _add(digest: hashlib._Hash, file: Path) -> None:
    """Add pages from all over a file."""
    size = file.stat().st_size
    digest.update(str(size).encode())
    with file.open("rb") as opened:
        for page in range(_PAGES):
            opened.seek(page * max(_PAGE, size // _PAGES))
            digest.update(opened.read(_PAGE))
