"""The events of a streamed message: blocks of thinking, text and calls, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from chairlift.apis.front import Events, Fields, Front, named_events
from chairlift.apis.messages_objects import error_object, message_object, stop_of, usage


class MessageEvents(Events):
    """Writes one streamed message."""

    def __init__(self, front: Front, common: Fields, used: Callable[[], Fields]) -> None:
        self._front = front
        self._common = common
        self._used = used
        self._is_started = False
        self._index = -1
        self._open: str | None = None  # the type of the block that is being written
        self._stop = stop_of(None, None)

    def write(self, chunks: Sequence[Fields]) -> bytes:
        """Return the events for these chunks."""
        return named_events(event for chunk in chunks for event in self._of(chunk))

    def fail(self, error: Fields, status: int) -> bytes:
        """Return the event of an error."""
        return named_events([error_object(self._front.in_own_names(error), status)])

    def _of(self, chunk: Fields) -> Iterator[Fields]:
        if not self._is_started:
            self._is_started = True
            none_yet = {"stop_reason": None, "stop_sequence": None}
            message = message_object(self._common, [], usage(self._used()), none_yet)
            yield {"type": "message_start", "message": message}
        for choice in chunk["choices"]:
            yield from self._deltas(choice["delta"])
            if choice["finish_reason"] is not None:
                self._stop = stop_of(choice["finish_reason"], choice["stop_reason"])
        if chunk.get("usage") is not None:
            yield from self._close()
            yield {"type": "message_delta", "delta": self._stop, "usage": usage(chunk["usage"])}
            yield {"type": "message_stop"}

    def _deltas(self, delta: Fields) -> Iterator[Fields]:
        if text := delta.get("reasoning_content"):
            if self._open != "thinking":
                yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": text})
        if text := delta.get("content"):
            if self._open != "text":
                yield from self._start({"type": "text", "text": "", "citations": None})
            yield self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._start({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            if arguments := function["arguments"]:
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _start(self, block: Fields) -> Iterator[Fields]:
        yield from self._close()
        self._index += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Fields]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}
