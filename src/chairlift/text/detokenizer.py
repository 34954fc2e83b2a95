"""Tokens to text as they come: whole characters only, and never a piece of a stop string."""

import codecs
from collections.abc import Iterable, Sequence

from chairlift.text.stops import StopSearch
from chairlift.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one sequence, growing token by token.

    Tokens are bytes, so each costs its own length and nothing is decoded twice. After the last token, the text is what
    `Tokenizer.decode` gives for the prompt and the output together, less the prompt's. One case differs: where a
    byte-fallback vocabulary produces broken UTF-8, `decode` takes back the good characters just before it, and a
    stream cannot; it replaces the broken bytes alone.

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
    ) -> None:
        self.stop_tokens: int | None = None
        """How many of the pushed tokens it took to complete the stop string."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.pieces.errors)
        self._stops = StopSearch(stop, include_stop)
        self._min_tokens = min_tokens
        self._pushed = 0
        self._shown: list[str] = []
        self._is_open = any(map(self._bytes, prompt_ids))  # the first token that shows is usually among the first two
        self._utf8.decode(self._tail(prompt_ids))

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    @property
    def text(self) -> str:
        """All that was returned so far."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that is now safe to show; after a stop string, nothing."""
        text = ""
        for id in ids:
            if self.stop_tokens is not None:
                break
            self._pushed += 1
            text += self._advance(self._utf8.decode(self._spell(id)))
        return self._show(text)

    def finish(self) -> str:
        """Return what was held back: unfinished characters, as U+FFFD, and what might have become a stop string."""
        if self.stopped is not None:
            return ""
        last = self._advance(self._utf8.decode(b"", final=True))
        return self._show(last + self._stops.flush())

    def _advance(self, piece: str) -> str:
        # A stop string counts from the first token after min_tokens on, wherever it began.
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
        """The end of the prompt's bytes: if it breaks off inside a character, the output begins by completing it."""
        tail = b""
        for id in reversed(prompt_ids):
            tail = self._bytes(id) + tail
            if len(tail) >= 3:  # a character has at most four bytes, so an unfinished one at most three
                break
        return tail
