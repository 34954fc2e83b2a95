"""The tokenizer that belongs to a checkpoint, and what needs it before a request reaches the engine."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.errors import ModelError
from chairlift.models.checkpoint import Checkpoint, GgufCheckpoint
from chairlift.text.tokenizer import Tokenizer


def read_tokenizer(checkpoint: Checkpoint | None) -> tuple[Tokenizer | None, str]:
    """The checkpoint's own tokenizer, or why there is none: token ids in and out work without."""
    if checkpoint is None:
        return None, "random weights have no tokenizer"
    try:
        if isinstance(checkpoint, GgufCheckpoint):
            return Tokenizer.from_gguf(checkpoint.metadata), ""
        return Tokenizer.from_folder(checkpoint.path), ""
    except ModelError as error:
        return None, str(error)


def spell_bad_words(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Bad words in token ids, at the start of a text and after a space."""
    if tokenizer is None:
        return ()
    spelled = (tokenizer.encode(lead + word, add_special_tokens=False) for word in words for lead in ("", " "))
    return tuple(dict.fromkeys(tuple(ids) for ids in spelled if ids))
