"""EngineThread: the thread that runs an engine for the streams of an AsyncEngine."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from math import inf

from chairlift.core.errors import EngineFault, RequestError
from chairlift.core.plan import Outcome
from chairlift.core.request import Request
from chairlift.engine.engine import Engine
from chairlift.engine.loop import drive
from chairlift.offline.driver import Driver
from chairlift.offline.stream import Stream
from chairlift.offline.track import Track
from chairlift.text.outputs import Answer, Chunk, RequestOutput
from chairlift.text.tokenizer import Tokenizer

log = logging.getLogger("chairlift")
Change = tuple[Stream, bool, Exception | None]  # a changed stream, whether it has ended, and its error


class EngineThread:
    """Steps an engine and delivers chunks to streams. The port of the engine's loop (engine/loop.py)."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        wake: Callable[[list[Change]], None],
    ) -> None:
        self.fault: EngineFault | None = None  # why the engine has stopped
        self._engine = engine
        self._tokenizer = tokenizer
        self._driver = Driver(engine)
        self._wake_in_loop = wake
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[str, tuple[Track, Stream]] = {}
        self._failed: list[str] = []  # ids of requests that failed outside the engine in this step
        self._is_open = True
        self._lock = threading.Lock()  # held to queue a request or to end: no request is queued after the end
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="chairlift-engine", daemon=True)
        self.start, self.join = self._thread.start, self._thread.join

    # ---- called by any thread

    def submit(self, request: Request, text: str | None, stream: Stream) -> None:
        """Queue a request for submission before the next step."""
        with self._lock:
            if not self._has_ended:
                self._orders.put(lambda: self._submit(request, text, stream))
                return
        self._wake([(stream, True, self.fault or RequestError("this AsyncEngine is closed: make another one"))])

    def abort(self, request_id: str) -> None:
        """Queue the abort of a request before the next step."""
        self._orders.put(lambda: self._abort([request_id]))

    def close(self) -> None:
        """End the loop after at most one more step."""
        self._orders.put(self._close)

    def fail(self, request_id: str, error: str) -> None:
        """End a request as failed after the current step; called by the engine's thread."""
        self._driver.fail(request_id, error)
        self._failed.append(request_id)

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            drive(self._engine, self)
        except Exception as error:  # a bug of ours: every stream must still end
            log.exception("the engine's thread has failed")
            self._stop_for(f"{type(error).__name__}: {error}")
        self._end_all()

    def _stop_for(self, reason: str) -> None:
        self.fault = EngineFault(f"the engine has stopped: {reason}; make a new one")

    def is_open(self) -> bool:
        """Whether the loop continues."""
        return self._is_open

    def receive(self, wait: float) -> None:
        """Carry out the orders of other threads."""
        with contextlib.suppress(queue.Empty):
            self._orders.get(block=wait > 0, timeout=None if wait == inf else wait)()
            while True:
                self._orders.get_nowait()()

    def report(self, outcome: Outcome, seconds: float) -> None:
        """Deliver new chunks to their streams."""
        self._driver.read(outcome)
        if self._engine.fault is not None:
            self._stop_for(self._engine.fault)
        changed = dict.fromkeys(sequence.request.id for sequence in outcome.sequences)
        changed |= dict.fromkeys(event.sequence.request.id for event in outcome.events)
        changed |= dict.fromkeys(self._failed)
        self._failed.clear()
        self._deliver([self._live[each] for each in changed if each in self._live])

    def _submit(self, request: Request, text: str | None, stream: Stream) -> None:
        params = request.params
        try:
            # With best_of > n, the n best answers are known only at their end.
            is_streamed = params.width == params.n
            track = self._driver.start(request, text, self._tokenizer, is_streamed=is_streamed)
        except Exception as error:  # a RequestError of the scheduler, or a bug of ours: it ends this request alone
            self._wake([(stream, True, error)])
        else:
            self._live[request.id] = (track, stream)

    def _abort(self, request_ids: list[str]) -> None:
        found = [self._live[each] for each in request_ids if each in self._live]
        self._driver.abort_unfinished([track for track, _ in found])
        self._deliver(found)

    def _close(self) -> None:
        self._is_open = False

    def _end_all(self) -> None:
        """End every stream, those of requests submitted after the loop's last step included."""
        with self._lock:
            self._has_ended = True
        self._abort(list(self._live))
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()
        self._abort(list(self._live))

    def _deliver(self, live: list[tuple[Track, Stream]]) -> None:
        changed: list[Change] = []
        for track, stream in live:
            output = track.output
            chunks = track.take_chunks()
            if output.finished:
                del self._live[stream.id]
                if track.request.params.width != track.request.params.n:
                    chunks = list(map(as_chunk, output.outputs))
            if chunks or output.finished:
                stream.output = output
                stream._chunks.extend(chunks)
                changed.append((stream, output.finished, self._error_of(output) if output.finished else None))
        if changed:
            self._wake(changed)

    def _error_of(self, output: RequestOutput) -> Exception | None:
        if self.fault is not None:
            return self.fault
        return None if output.error is None else RequestError(output.error)

    def _wake(self, changed: list[Change]) -> None:
        """Wake the readers in their event loop; abort the requests of a closed event loop, which has no readers."""
        for loop in {stream._loop for stream, _, _ in changed}:
            ours = [change for change in changed if change[0]._loop is loop]
            try:
                loop.call_soon_threadsafe(self._wake_in_loop, ours)
            except RuntimeError:
                aborted = [self._live.pop(stream.id)[0] for stream, _, _ in ours if stream.id in self._live]
                log.warning("the event loop of %d streams is closed: their requests are aborted", len(aborted))
                self._driver.abort_unfinished(aborted)


def as_chunk(answer: Answer) -> Chunk:
    """Return a whole answer as one chunk."""
    ids, logprobs = list(answer.token_ids), answer.logprobs
    return Chunk(answer.text, ids, answer.index, answer.finish_reason, answer.stop_reason, logprobs)
