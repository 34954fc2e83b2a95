"""The events of a streamed response: items are added, filled and completed one after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from chairlift.apis.front import Events, Fields, Front, named_events
from chairlift.apis.responses_items import (
    call_item,
    message_item,
    new_id,
    reasoning_item,
    reasoning_part,
    response_object,
    status_of,
    text_part,
)

_KEPT_SCORES = 1 << 12  # log-probabilities that the last events repeat; those of a longer answer are in deltas alone


class _Item(ABC):
    """An item that is being written."""

    prefix = ""
    event = ""  # the name of its events, without .delta and .done

    def __init__(self, index: int) -> None:
        self.id = new_id(self.prefix)
        self.index = index
        self._texts: list[str] = []

    @property
    def place(self) -> Fields:
        """The fields of its events that say where they belong."""
        return {"item_id": self.id, "output_index": self.index}

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self._texts)

    def start(self) -> Iterator[Fields]:
        """The events that add it."""
        item = self.written("in_progress", is_started=False)
        yield {"type": "response.output_item.added", "output_index": self.index, "item": item}

    def delta(self, text: str, scores: list[Fields]) -> Fields:
        """Return the event that adds text."""
        self._texts.append(text)
        return {"type": f"{self.event}.delta", **self.place, "delta": text}

    def finish(self, status: str) -> Iterator[Fields]:
        """The events that complete it."""
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.written(status)}

    @abstractmethod
    def written(self, status: str, *, is_started: bool = True) -> Fields:
        """Return the item's object."""


class _TextItem(_Item):
    """An item with one part of text."""

    @property
    def place(self) -> Fields:
        """The fields of its events that say where they belong."""
        return {**super().place, "content_index": 0}

    def start(self) -> Iterator[Fields]:
        """The events that add it and its part."""
        yield from super().start()
        yield {"type": "response.content_part.added", **self.place, "part": self.part()}

    def finish(self, status: str) -> Iterator[Fields]:
        """The events that complete its part and itself."""
        part = self.part()
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield {"type": f"{self.event}.done", **self.place, "text": part["text"], **more}
        yield {"type": "response.content_part.done", **self.place, "part": part}
        yield from super().finish(status)

    @abstractmethod
    def part(self) -> Fields:
        """Return its part."""


class _Message(_TextItem):
    prefix, event = "msg", "response.output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._scores: list[Fields] = []
        self._num_scores = 0

    def delta(self, text: str, scores: list[Fields]) -> Fields:
        """Return the event that adds text."""
        self._num_scores += sum(1 + len(score["top_logprobs"]) for score in scores)
        if self._num_scores <= _KEPT_SCORES:
            self._scores += scores
        else:
            self._scores.clear()
        return super().delta(text, scores) | {"logprobs": scores}

    def part(self) -> Fields:
        """Return its part."""
        return text_part(self.text, self._scores)

    def written(self, status: str, *, is_started: bool = True) -> Fields:
        """Return the item's object."""
        return message_item(self.id, [self.part()] if is_started else [], status)


class _Reasoning(_TextItem):
    prefix, event = "rs", "response.reasoning_text"

    def part(self) -> Fields:
        """Return its part."""
        return reasoning_part(self.text)

    def written(self, status: str, *, is_started: bool = True) -> Fields:
        """Return the item's object."""
        return reasoning_item(self.id, [self.part()] if is_started else [], status)


class _Call(_Item):
    prefix, event = "fc", "response.function_call_arguments"

    def __init__(self, index: int, call: Fields) -> None:
        super().__init__(index)
        self._call_id, self._name = call["id"], call["function"]["name"]

    def finish(self, status: str) -> Iterator[Fields]:
        """The events that complete its arguments and itself."""
        yield {"type": f"{self.event}.done", **self.place, "name": self._name, "arguments": self.text}
        yield from super().finish(status)

    def written(self, status: str, *, is_started: bool = True) -> Fields:
        """Return the item's object."""
        return call_item(self.id, self._call_id, self._name, self.text, status)


class ResponseEvents(Events):
    """Writes one streamed response."""

    def __init__(self, front: Front, common: Fields, repeated: Fields) -> None:
        self._front = front
        self._common = common
        self._repeated = repeated
        self._output: list[Fields] = []  # complete items
        self._item: _Item | None = None  # the one that is being written
        self._finish_reason: str | None = None
        self._number = 0

    def write(self, chunks: Sequence[Fields]) -> bytes:
        """Return the events for these chunks."""
        return self._encode(event for chunk in chunks for event in self._of(chunk))

    def fail(self, error: Fields, status: int) -> bytes:
        """Return the events of a response that failed."""
        return self._encode(self._failed(self._front.in_own_names(error)))

    def _encode(self, events: Iterator[Fields]) -> bytes:
        return named_events(map(self._numbered, events))

    def _numbered(self, event: Fields) -> Fields:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _of(self, chunk: Fields) -> Iterator[Fields]:
        if self._number == 0:
            yield from self._start()
        for choice in chunk["choices"]:
            yield from self._deltas(choice)
            self._finish_reason = choice["finish_reason"] or self._finish_reason
        if chunk.get("usage") is not None:
            yield from self._finish(chunk["usage"])

    def _start(self) -> Iterator[Fields]:
        yield {"type": "response.created", "response": self._response("in_progress")}
        yield {"type": "response.in_progress", "response": self._response("in_progress")}

    def _deltas(self, choice: Fields) -> Iterator[Fields]:
        delta, scores = choice["delta"], choice["logprobs"]
        if text := delta.get("reasoning_content"):
            yield from self._add(_Reasoning, text)
        found = [] if scores is None else scores["content"]
        if (text := delta.get("content")) or (found and text is not None):
            yield from self._add(_Message, text, found)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._open(_Call(self._next, call))
            if arguments := call["function"]["arguments"]:
                assert self._item is not None
                yield self._item.delta(arguments, [])

    def _add(self, kind: type[_TextItem], text: str, scores: Sequence[Fields] = ()) -> Iterator[Fields]:
        if not isinstance(self._item, kind):
            yield from self._open(kind(self._next))
        assert self._item is not None
        yield self._item.delta(text, list(scores))

    @property
    def _next(self) -> int:
        """The index of the item after the one that is being written."""
        return len(self._output) + (self._item is not None)

    def _open(self, item: _Item) -> Iterator[Fields]:
        yield from self._close("completed")
        self._item = item
        yield from item.start()

    def _close(self, status: str) -> Iterator[Fields]:
        if (item := self._item) is not None:
            self._item = None
            self._output.append(item.written(status))
            yield from item.finish(status)

    def _finish(self, used: Fields) -> Iterator[Fields]:
        status = status_of(self._finish_reason)
        if self._item is None and not self._output:
            yield from self._open(_Message(0))
        yield from self._close(status)
        yield {"type": f"response.{status}", "response": self._response(status, used=used)}

    def _failed(self, error: Fields) -> Iterator[Fields]:
        if self._number == 0:
            yield from self._start()
        yield from self._close("incomplete")
        yield {"type": "error", **{name: error[name] for name in ("code", "message", "param")}}
        shown = {"code": "server_error", "message": error["message"]}
        yield {"type": "response.failed", "response": self._response("failed", error=shown)}

    def _response(self, status: str, **more: Any) -> Fields:
        return response_object(self._common, self._repeated, output=self._output, status=status, **more)
