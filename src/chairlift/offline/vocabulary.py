"""The tokenizer that belongs to a checkpoint."""

from __future__ import annotations

from chairlift.core.errors import ModelError
from chairlift.models.checkpoint import Checkpoint, GgufCheckpoint
from chairlift.text.tokenizer import Tokenizer


def read_tokenizer(checkpoint: Checkpoint | None) -> tuple[Tokenizer | None, str]:
    """Return the checkpoint's tokenizer, or None and the reason: token ids in and out work without one."""
    if checkpoint is None:
        return None, "random weights have no tokenizer"
    try:
        if isinstance(checkpoint, GgufCheckpoint):
            return Tokenizer.from_gguf(checkpoint.metadata), ""
        return Tokenizer.from_folder(checkpoint.path), ""
    except ModelError as error:
        return None, str(error)
