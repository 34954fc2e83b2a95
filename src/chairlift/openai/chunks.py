"""The pieces of a streamed reply, in OpenAI's shapes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chairlift.openai.replies import Scores, chat_logprobs, text_logprobs

if TYPE_CHECKING:
    from chairlift.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Piece:
    """What came of one answer since the last time."""

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Scores] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def join(self, later: Piece) -> None:
        """Take in the piece that follows."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class Chunks:
    """Writes the chunks of one reply: what they have in common is made once."""

    kind = ""

    def __init__(self, id: str, model: str, tokenizer: Tokenizer | None, *, usage: bool, token_ids: bool) -> None:
        self._common = {"id": id, "object": self.kind, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._with_usage = usage
        self._with_ids = token_ids

    def of(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The chunks that carry a piece."""
        raise NotImplementedError

    def usage(self, used: dict[str, int]) -> dict[str, Any]:
        """The last chunk, with no choices."""
        return {**self._common, "choices": [], "usage": used}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._common, "choices": [choice]}
        if self._with_usage:
            chunk["usage"] = None
        return chunk


class ChatChunks(Chunks):
    """A chat completion: the role first, then the content, then why it ended."""

    kind = "chat.completion.chunk"

    def __init__(self, *args: Any, top: int, prompt_ids: list[int], **options: Any) -> None:
        super().__init__(*args, **options)
        self._top = top
        self._prompt_ids = prompt_ids
        self._begun: set[int] = set()

    def of(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The chunks that carry a piece."""
        if piece.choice not in self._begun:
            self._begun.add(piece.choice)
            first = self._chunk(self._choice(piece.choice, {"role": "assistant", "content": ""}))
            if self._with_ids:
                first["prompt_token_ids"] = self._prompt_ids
            yield first
        scores = None
        if piece.logprobs:
            scores = chat_logprobs(piece.token_ids, piece.logprobs, self._top, self._tokenizer)
        if piece.text or scores is not None or (self._with_ids and piece.token_ids):
            choice = self._choice(piece.choice, {"content": piece.text})
            choice["logprobs"] = scores
            if self._with_ids:
                choice["token_ids"] = piece.token_ids
            yield self._chunk(choice)
        if piece.finish_reason is not None:
            choice = self._choice(piece.choice, {})
            choice |= {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
            yield self._chunk(choice)

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class TextChunks(Chunks):
    """A plain completion: text, and why it ended with the last of it."""

    kind = "text_completion"

    def __init__(self, *args: Any, echo: list[Piece] | None, no_output: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._echo = {piece.choice: piece for piece in echo or ()}
        self._no_output = no_output
        self._offsets: dict[int, int] = {}

    def of(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The chunks that carry a piece."""
        if (echo := self._echo.pop(piece.choice, None)) is not None:
            yield self._piece(echo)
        if self._no_output:
            piece = Piece(piece.choice, "", [], None, piece.finish_reason, piece.stop_reason)
        if piece.text or piece.finish_reason is not None or piece.logprobs or (self._with_ids and piece.token_ids):
            yield self._piece(piece)

    def _piece(self, piece: Piece) -> dict[str, Any]:
        offset = self._offsets.get(piece.choice, 0)
        self._offsets[piece.choice] = offset + len(piece.text)
        choice: dict[str, Any] = {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": None
            if not piece.logprobs
            else text_logprobs(piece.token_ids, piece.logprobs, self._tokenizer, offset),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._with_ids:
            choice["token_ids"] = piece.token_ids
        return self._chunk(choice)
