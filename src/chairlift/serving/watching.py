"""Watching: an engine's steps for the HTTP processes that ask for them; nothing is recorded while none does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from chairlift.core.request import Request
from chairlift.engine.engine import Engine
from chairlift.engine.recorder import Recorder
from chairlift.serving.link import Link
from chairlift.serving.messages import Watch, Watched

log = logging.getLogger("chairlift")
Applied = Callable[..., None] | None  # Engine.on_applied
_SEND_EVERY = 0.1  # seconds between two records
_encode = msgspec.json.Encoder().encode


class Watching:
    """Records steps until the last HTTP process's request for them has expired, and sends them in batches."""

    def __init__(self, engine: Engine, name_of: Callable[[Request], str]) -> None:
        self._engine = engine
        self._name_of = name_of
        self._until: dict[Link, float] = {}
        self._missing: set[Link] = set()  # HTTP processes that were not sent a record, and need a new beginning
        self._recorder: Recorder | None = None
        self._next = 0.0

    def renew(self, link: Link, order: Watch, now: float) -> None:
        """Send records to an HTTP process for a while, from a beginning if it asks for one or was sent none."""
        is_new = order.is_new or link not in self._until
        try:
            if self._recorder is None:
                self._recorder = Recorder(self._engine, self._name_of, order.prompt_tokens)
                self._engine.on_applied = self._guarded(self._engine.on_applied)
            elif is_new:
                self._send(self._recorder)  # or what has happened would be lost
                self._begin()
        except Exception as error:
            self._give_up(error)
        self._until[link] = now + order.seconds
        self._next = 0.0 if is_new else self._next

    def send(self, now: float) -> None:
        """Send what has happened, if an HTTP process asked for it and it is time."""
        recorder = self._recorder
        if recorder is None or (now < self._next and not recorder.is_full):
            return
        self._next = now + _SEND_EVERY
        self._until = {link: until for link, until in self._until.items() if now < until}
        self._missing &= self._until.keys()
        if self._until:
            try:
                self._send(recorder)
                if any(link.has_room for link in self._missing):
                    self._begin()
            except Exception as error:
                self._give_up(error)
        else:
            recorder.close()
            self._recorder = None

    def _begin(self) -> None:
        """Let the next record have all that a new reader must know."""
        if self._recorder is not None:
            self._recorder.begin()
            self._missing = {link for link in self._missing if not link.has_room}

    def _send(self, recorder: Recorder) -> None:
        """Send to every HTTP process that reads what it is sent; the others are sent a new beginning later."""
        record = recorder.take()
        if record is not None:
            message = Watched(_encode(record))
            for link in self._until:
                if link in self._missing or not link.has_room or not link.send(message):
                    self._missing.add(link)  # what follows cannot be understood without it

    def _guarded(self, applied: Applied) -> Applied:
        """Return a function that records a step, and stops recording if that fails: no request may suffer from it."""

        def record(*step: Any) -> None:
            try:
                if applied is not None:
                    applied(*step)
            except Exception as error:
                self._give_up(error)

        return record

    def _give_up(self, error: Exception) -> None:
        """Stop recording until an HTTP process asks again."""
        log.error("steps cannot be recorded for the live page", exc_info=error)
        self._engine.on_applied = self._recorder = None
