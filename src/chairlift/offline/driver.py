"""Driver: steps the engine in this process and hands what comes back to the requests that wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from chairlift.core.request import Request
from chairlift.engine.engine import Engine
from chairlift.offline.track import Track
from chairlift.text.outputs import Chunk
from chairlift.text.tokenizer import Tokenizer


class Driver:
    """Owns every request between its submission and its end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tracks: dict[str, Track] = {}
        self._listeners: dict[str, Track] = {}  # those that are told of each token
        self._failures: list[tuple[str, str]] = []  # requests that failed outside the engine in this step, and why

    def start(self, request: Request, text: str | None, tokenizer: Tokenizer | None, *, is_streamed: bool) -> Track:
        """Submit a request, or refuse it with a RequestError."""
        self._engine.submit(request)  # which checks it: nothing may read its prompt before
        track = Track(request, text, tokenizer, is_streamed=is_streamed)
        self._tracks[request.id] = self._listeners[request.id] = track
        return track

    def fail(self, request_id: str, error: str) -> None:
        """End a request as failed when the step that runs now is over."""
        self._failures.append((request_id, error))

    def run(self, tracks: list[Track], progress: bool) -> None:
        """Step until all of these have ended, with a bar if that is wanted."""
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
        """What comes of one request, as it comes; leaving the loop early ends the request."""
        try:
            while True:
                if chunks := track.take_chunks():
                    yield from chunks  # meanwhile another stream's steps may bring this one more
                elif track.output.finished:
                    return
                else:
                    self.step()
        finally:
            self.leave([track])

    def step(self) -> int:
        """One step of the engine; how many tokens it brought."""
        outcome = self._engine.step()
        if self._failures:
            self._end_failed()
        self._dispatch(outcome.events, self._tracks)
        if self._listeners:
            self._dispatch(zip(outcome.sequences, outcome.tokens, strict=True), self._listeners)
        return len(outcome.tokens) + sum(event.token is not None for event in outcome.events)

    def leave(self, tracks: Iterable[Track]) -> None:
        """End what was not finished when its caller left."""
        for track in tracks:
            if not track.output.finished:
                self._dispatch(self._engine.abort(track.request.id), self._tracks)
                self._forget(track)

    def close(self) -> None:
        """End all there is."""
        self.leave(list(self._tracks.values()))

    def _end_failed(self) -> None:
        """End requests that failed, before the step's own events: they may have ended in it as if all were well."""
        failures, self._failures = self._failures, []
        for request_id, error in failures:
            self._engine.abort(request_id, error)
            if (track := self._tracks.get(request_id)) is not None:
                track.fail(error, self._engine.clock.now())
                self._forget(track)

    def _forget(self, track: Track) -> None:
        self._tracks.pop(track.request.id, None)
        self._listeners.pop(track.request.id, None)

    def _dispatch(self, news: Iterable[tuple[Any, ...]], tracks: dict[str, Track]) -> None:
        """Hand events, or as much of them as a token is, to their requests."""
        now = self._engine.clock.now
        for each in news:
            sequence = each[0]
            track = tracks.get(sequence.request.id)
            if track is None:
                continue
            if track.read(now, *each):
                self._engine.stop(sequence)  # its event is no news: the text has ended already
            if not track.wants_tokens:
                self._listeners.pop(track.request.id, None)
            if track.output.finished:
                self._tracks.pop(track.request.id, None)
