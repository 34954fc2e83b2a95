"""OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from chairlift.apis.front import Events, Fields, Front
from chairlift.apis.responses_events import ResponseEvents
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
from chairlift.apis.responses_request import FIELDS, read_response, repeated_fields


class ResponsesFront(Front):
    """`POST /v1/responses`."""

    name = "responses"
    prefix = "resp_"
    fields = FIELDS
    names: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
    }

    def read(self, raw: Fields) -> tuple[Fields, Fields]:
        """Return the body as that of a chat completion, and the fields that the reply repeats."""
        return read_response(raw), repeated_fields(raw)

    def reply(self, chat: Fields, repeated: Fields) -> Fields:
        """Return the response object."""
        choice = chat["choices"][0]
        status = status_of(choice["finish_reason"])
        return response_object(chat, repeated, output=_output(choice, status), status=status, used=chat["usage"])

    def events(self, common: Fields, repeated: Fields, used: Callable[[], Fields]) -> Events:
        """Return the writer of one streamed response."""
        return ResponseEvents(self, common, repeated)

    def error(self, error: Fields, status: int, id: str) -> Fields:
        """Return OpenAI's body of an error response."""
        return {"error": self.in_own_names(error)}


def _output(choice: Fields, status: str) -> list[Fields]:
    """Return the items of an answer; only the last one can be incomplete."""
    message, items = choice["message"], []
    calls: list[Any] = message.get("tool_calls") or []
    if reasoning := message.get("reasoning_content"):
        items.append(reasoning_item(new_id("rs"), [reasoning_part(reasoning)]))
    if message["content"] or not (items or calls):
        scores = [] if choice["logprobs"] is None else choice["logprobs"]["content"]
        items.append(message_item(new_id("msg"), [text_part(message["content"] or "", scores)]))
    for call in calls:
        function = call["function"]
        items.append(call_item(new_id("fc"), call["id"], function["name"], function["arguments"]))
    items[-1]["status"] = status
    return items
