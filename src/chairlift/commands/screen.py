"""Terminal output that several commands share: answers on stdout; notes, progress and speed on stderr."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from chairlift.core.settings import Settings
from chairlift.core.words import counted

if TYPE_CHECKING:
    from chairlift.offline.llm import LLM
    from chairlift.text.outputs import Chunk

notes = Console(stderr=True, highlight=False, soft_wrap=True)

# A model may write escape sequences, which a terminal would execute.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def begin_loading(model: str, settings: dict[str, Any], *, is_told: bool) -> None:
    """Check the settings, print the model's name and download it, before the import of torch takes seconds."""
    Settings.of(**settings)
    if is_told:
        notes.print(f"loading {model}", style="dim", markup=False)
    if settings.get("load_format") != "dummy":
        from chairlift.models.sources import resolve

        resolve(model, progress=is_told)


def open_llm(model: str, settings: dict[str, Any], *, is_told: bool | None = None) -> LLM:
    """Load a model, with progress on stderr if it is a terminal."""
    begin_loading(model, settings, is_told=sys.stderr.isatty() if is_told is None else is_told)
    from chairlift.offline.llm import LLM

    settings = {"seed": secrets.randbits(31), **settings}  # at a terminal, asking again should give another answer
    return LLM(model, progress=sys.stderr.isatty(), **settings)


def write(text: str) -> None:
    """Write a piece of an answer and flush it."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class Speed:
    """Counts the tokens of a streamed answer and measures its times."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first = self._last = self._start
        self._tokens = 0
        self._reason: str | None = None

    def watch(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """Yield the chunks unchanged, counting them."""
        for chunk in chunks:
            self._last = time.monotonic()
            if not self._tokens:
                self._first = self._last
            self._tokens += len(chunk.token_ids)
            self._reason = chunk.finish_reason
            yield chunk

    def __str__(self) -> str:
        after = self._last - self._first
        speed = f", {(self._tokens - 1) / after:.1f} tok/s" if after > 0 and self._tokens > 1 else ""
        first = f", first token after {self._first - self._start:.2f} s" if self._tokens else ""
        cut = ", cut at --max-tokens or the context's end" if self._reason == "length" else ""
        return f"{counted(self._tokens, 'token')}{speed}{first}{cut}"
