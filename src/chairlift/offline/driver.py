"""Driver: steps the engine in this process and passes each request the events of its sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from chairlift.core.plan import Event, Outcome
from chairlift.core.request import Request, Sequence
from chairlift.engine.engine import Engine
from chairlift.offline.track import Track
from chairlift.text.message import PLAIN, MessageFormat
from chairlift.text.outputs import Chunk
from chairlift.text.tokenizer import Tokenizer


class Driver:
    """Owns every request between its submission and its end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tracks: dict[str, Track] = {}
        self._listeners: dict[str, Track] = {}  # the requests that read each token
        self._failures: list[tuple[str, str]] = []  # requests that failed outside the engine in this step, and why

    def start(
        self,
        request: Request,
        text: str | None,
        tokenizer: Tokenizer | None,
        *,
        is_streamed: bool,
        form: MessageFormat = PLAIN,
    ) -> Track:
        """Submit a request, or reject it with a RequestError."""
        self._engine.submit(request)  # checks the request: its prompt must not be read before
        track = Track(request, text, tokenizer, is_streamed=is_streamed, form=form)
        self._tracks[request.id] = self._listeners[request.id] = track
        return track

    def fail(self, request_id: str, error: str) -> None:
        """End a request as failed after the current step."""
        self._failures.append((request_id, error))

    def run(self, tracks: list[Track], progress: bool) -> None:
        """Step until all of these requests have ended, with a progress bar if `progress`."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
        )
        clock = self._engine.clock
        start = clock.now()
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
            task = bar.add_task("generating", total=len(tracks), speed="")
            tokens, shown = 0, start
            for track in tracks:
                while not track.output.finished:
                    tokens += self.step()
                    if progress and (now := clock.now()) - shown > 0.1:
                        shown, done = now, sum(each.output.finished for each in tracks)
                        bar.update(task, completed=done, speed=f"{tokens / (now - start):,.0f} tok/s")

    def stream(self, track: Track) -> Iterator[Chunk]:
        """Yield the chunks of one request; closing the generator early aborts it."""
        try:
            while True:
                if chunks := track.take_chunks():
                    yield from chunks  # meanwhile the steps of another stream may add more to this one
                elif track.output.finished:
                    return
                else:
                    self.step()
        finally:
            self.abort_unfinished([track])

    def step(self) -> int:
        """Run one step of the engine; return the number of generated tokens."""
        return self.read(self._engine.step())

    def read(self, outcome: Outcome) -> int:
        """Pass each request its part of a step's outcome; return the number of generated tokens."""
        if self._failures:
            self._end_failed()
        self._read_events(outcome.events)
        if self._listeners:
            for sequence, token in zip(outcome.sequences, outcome.tokens, strict=True):
                if (track := self._listeners.get(sequence.request.id)) is not None:
                    self._read(track, sequence, (token,))
        return len(outcome.tokens) + sum(event.token is not None for event in outcome.events)

    def abort_unfinished(self, tracks: Iterable[Track]) -> None:
        """Abort the requests that have not finished: their caller has stopped reading."""
        for track in tracks:
            if not track.output.finished:
                self._read_events(self._engine.abort(track.request.id))
                self._forget(track)

    def close(self) -> None:
        """Abort all requests."""
        self.abort_unfinished(list(self._tracks.values()))

    def _end_failed(self) -> None:
        """End failed requests before the step's own events are read: they may have finished in this step."""
        failures, self._failures = self._failures, []
        for request_id, error in failures:
            self._engine.abort(request_id, error)
            if (track := self._tracks.get(request_id)) is not None:
                track.fail(error, self._engine.clock.now)
                self._forget(track)

    def _forget(self, track: Track) -> None:
        self._tracks.pop(track.request.id, None)
        self._listeners.pop(track.request.id, None)

    def _read_events(self, events: Iterable[Event]) -> None:
        for sequence, token, reason, scored, prompt_scores, error, _ in events:
            if (track := self._tracks.get(sequence.request.id)) is not None:
                tokens = () if token is None else (token,)
                scores = () if scored is None else (scored,)
                self._read(track, sequence, tokens, reason, scores, prompt_scores, error)

    def _read(self, track: Track, sequence: Sequence, tokens: tuple[int, ...], *more: Any) -> None:
        if track.read(self._engine.clock.now, sequence, tokens, *more):
            self._engine.stop(sequence)  # the event that this returns is not needed: the answer has ended already
        if not track.wants_tokens:
            self._listeners.pop(track.request.id, None)
        if track.output.finished:
            self._tracks.pop(track.request.id, None)
