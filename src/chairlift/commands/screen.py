"""What the terminal commands share: answers on stdout, everything else on stderr, and how fast it was."""

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

# A model may write escape sequences, which a terminal would obey.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def begin_loading(model: str, settings: dict[str, Any], *, is_told: bool) -> None:
    """Check the settings, say what is loaded, and fetch it if it must be, before the import of torch takes seconds."""
    Settings.of(**settings)
    if is_told:
        notes.print(f"loading {model}", style="dim", markup=False)
    if settings.get("load_format") != "dummy":
        from chairlift.models.sources import resolve

        resolve(model, progress=is_told)


def open_llm(model: str, settings: dict[str, Any], *, is_told: bool | None = None) -> LLM:
    """Load a model, with its progress on stderr where someone watches."""
    begin_loading(model, settings, is_told=sys.stderr.isatty() if is_told is None else is_told)
    from chairlift.offline.llm import LLM

    settings = {"seed": secrets.randbits(31), **settings}  # a person who asks twice wants two answers
    return LLM(model, progress=sys.stderr.isatty(), **settings)


def write(text: str) -> None:
    """Show a piece of an answer at once."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class Speed:
    """Counts an answer's tokens and times as it streams by."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first = self._last = self._start
        self._tokens = 0
        self._reason: str | None = None

    def watch(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """The same chunks, counted."""
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
