"""Tokens to text, incrementally: whole characters only, and never part of a stop string."""

import codecs
from collections.abc import Iterable, Sequence

from chairlift.text.stops import StopSearch
from chairlift.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one sequence, token by token.

    Tokens are bytes, so each costs its own length and none is decoded twice. After the last token, the text equals
    `Tokenizer.decode` of prompt and output together, without the prompt's text. One case differs: where a byte-fallback
    vocabulary produces broken UTF-8, `decode` also replaces valid characters just before it; a stream has already
    returned those, and replaces the broken bytes alone.

    >>> ggml = {"model": "gpt2", "pre": "gpt-2", "tokens": ["h", "i", "hi", "!"], "merges": ["h i"]}
    >>> tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in ggml.items()})
    >>> reader = IncrementalDetokenizer(tokenizer, stop=["!!"])
    >>> reader.push([2, 3]), reader.push([2, 3]), reader.push([3])
    ('hi', '!hi', '')
    >>> reader.stopped, reader.stop_tokens
    ('!!', 5)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self.stop_tokens: int | None = None
        """The number of pushed tokens up to the end of the stop string."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - kept if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.pieces.errors)
        self._stops = StopSearch(stop, include_stop)
        self._min_tokens = min_tokens
        self._pushed = 0
        self._shown: list[str] = []
        self._is_open = any(map(self._bytes, prompt_ids))  # the first token with text is usually among the first two
        self._utf8.decode(self._tail(prompt_ids))

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    @property
    def text(self) -> str:
        """All text returned so far."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def push(self, ids: Iterable[int]) -> str:
        """Read the next tokens and return the text that is now safe to show; after a stop string, nothing."""
        text = ""
        for id in ids:
            if self.stop_tokens is not None:
                break
            self._pushed += 1
            text += self._advance(self._utf8.decode(self._spell(id)))
        return self._show(text)

    def finish(self) -> str:
        """Return the text held back: incomplete characters, as U+FFFD, and a possible beginning of a stop string."""
        if self.stopped is not None:
            return ""
        last = self._advance(self._utf8.decode(b"", final=True))
        return self._show(last + self._stops.flush())

    def _advance(self, piece: str) -> str:
        # A stop string counts if it ends after the first min_tokens tokens, wherever it began.
        safe = self._stops.feed(piece, armed=self._pushed > self._min_tokens)
        if self._stops.found is not None:
            self.stop_tokens = self._pushed
        return safe

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text

    def _spell(self, id: int) -> bytes:
        if self._is_open:
            return b"" if id in self._hidden else self._tokenizer.token_bytes(id)
        spelled = self._bytes(id)
        if spelled:
            self._is_open = True
            return self._tokenizer.pieces.open(spelled)
        return spelled

    def _bytes(self, id: int) -> bytes:
        return b"" if id in self._hidden else self._tokenizer.token_bytes(id)

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the end of the prompt's bytes: the output completes a character that the prompt leaves incomplete."""
        tail = b""
        for id in reversed(prompt_ids):
            tail = self._bytes(id) + tail
            if len(tail) >= 3:  # a character has at most four bytes, so an unfinished one at most three
                break
        return tail
