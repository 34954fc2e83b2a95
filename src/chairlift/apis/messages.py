"""Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import msgspec

from chairlift.apis.front import Events, Fields, Front
from chairlift.apis.messages_events import MessageEvents
from chairlift.apis.messages_objects import error_object, message_object, stop_of, usage
from chairlift.apis.messages_request import FIELDS, read_message


class MessagesFront(Front):
    """`POST /v1/messages`."""

    name = "messages"
    prefix = "msg_"
    id_header = "request-id"
    fields = FIELDS
    names: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "max_thinking_tokens": "thinking.budget_tokens",
    }

    def read(self, raw: Fields) -> tuple[Fields, Fields]:
        """Return the body as that of a chat completion; the reply repeats nothing."""
        return read_message(raw), {}

    def reply(self, chat: Fields, repeated: Fields) -> Fields:
        """Return the message object."""
        choice = chat["choices"][0]
        stop = stop_of(choice["finish_reason"], choice["stop_reason"])
        return message_object(chat, _content(choice["message"]), usage(chat["usage"]), stop)

    def events(self, common: Fields, repeated: Fields, used: Callable[[], Fields]) -> Events:
        """Return the writer of one streamed message."""
        return MessageEvents(self, common, used)

    def error(self, error: Fields, status: int, id: str) -> Fields:
        """Return Anthropic's body of an error response."""
        return error_object(self.in_own_names(error), status) | {"request_id": id}


def _content(message: Fields) -> list[Fields]:
    blocks: list[Fields] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"], "citations": None})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}
        )
    return blocks


def _input(arguments: str) -> Fields:
    """Return the arguments of a call; none if max_tokens cut them off."""
    try:
        found = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
