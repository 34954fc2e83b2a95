"""The tokenizer that belongs to a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from chairlift.core.errors import ModelError
from chairlift.models.checkpoint import Checkpoint, GgufCheckpoint
from chairlift.text.tokenizer import Tokenizer


def read_tokenizer(model: str, checkpoint: Checkpoint | None) -> tuple[Tokenizer | None, str]:
    """Return the model's tokenizer, or None and the reason: token ids in and out work without one.

    Random weights have no checkpoint, but their folder may have a tokenizer.
    """
    try:
        if checkpoint is None:
            if not (Path(model) / "tokenizer.json").is_file():
                return None, "random weights have no tokenizer"
            return Tokenizer.from_folder(Path(model)), ""
        if isinstance(checkpoint, GgufCheckpoint):
            return Tokenizer.from_gguf(checkpoint.read_metadata()), ""
        return Tokenizer.from_folder(checkpoint.path), ""
    except ModelError as error:
        return None, str(error)


def all_eos_ids(tokenizer: Tokenizer | None, of_config: Iterable[int], vocab_size: int) -> frozenset[int]:
    """Return the tokens that end an answer: the config's and the tokenizer's, which often differ.

    A tokenizer may have more tokens than the model has logits: the rest can never be sampled.
    """
    own = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(of_config) | (frozenset() if own is None or own >= vocab_size else {own})
