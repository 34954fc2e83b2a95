"""anthropic: the Messages API."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from pydantic import BaseModel, Field
from trying import LOOPS, MESSAGES, MODEL, QUESTION, TOOLS, URL, attempt, told, use


class Colour(BaseModel):
    """A colour."""

    name: str = Field(max_length=12)
    is_warm: bool


client = Anthropic(base_url=URL, api_key="none")
tools = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]


def create(**more: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 8, **more})


def streamed() -> bool:
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=8) as stream:
        text = "".join(stream.text_stream)
        return bool(text) and stream.get_final_text() == text


def agent(stream: bool) -> int:
    """Three calls, each with the results of those before, then an answer."""
    talk: list[Any] = [{"role": "user", "content": QUESTION}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    for _ in range(LOOPS):
        asked = {"messages": talk, "tools": tools, "tool_choice": choice, "max_tokens": 200}
        if stream:
            with client.messages.stream(model=MODEL, **asked) as events:
                reply = events.get_final_message()
        else:
            reply = create(**asked)
        assert reply.stop_reason == "tool_use"
        [call] = [block for block in reply.content if block.type == "tool_use"]
        talk.append({"role": "assistant", "content": reply.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": use(call.name, call.input)}
        talk.append({"role": "user", "content": [result]})
    assert create(messages=talk, tools=tools).content
    return LOOPS


attempt("messages", lambda: create(system="Answer in one word.").content[0].text)
attempt("stream", streamed)
attempt("count_tokens", lambda: client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 5)
attempt("stop_sequences", lambda: create(stop_sequences=["a"], max_tokens=60).stop_reason == "stop_sequence")
attempt(
    "messages.parse",
    lambda: isinstance(
        client.messages.parse(model=MODEL, messages=MESSAGES, max_tokens=200, output_format=Colour).parsed_output,
        Colour,
    ),
)
attempt("an agent of three calls", lambda: agent(stream=False) == LOOPS)
attempt("an agent of three calls, streamed", lambda: agent(stream=True) == LOOPS)
attempt("another model is not_found", lambda: told(lambda: create(model="claude"), "not_found_error"))
