"""litellm, as a provider of OpenAI's kind."""

from __future__ import annotations

from typing import Any

import litellm
from pydantic import BaseModel, Field
from trying import CALLED, LOOPS, MESSAGES, MODEL, QUESTION, TOOL, TOOLS, URL, attempt, told, use


class Colour(BaseModel):
    """A colour."""

    name: str = Field(max_length=12)
    is_warm: bool


def chat(**more: Any) -> Any:
    asked = {"model": f"openai/{MODEL}", "messages": MESSAGES, "max_tokens": 8, **more}
    return litellm.completion(api_base=f"{URL}/v1", api_key="none", num_retries=0, **asked)


long = [{"role": "user", "content": "one two three four five six " * 3000}]
attempt("chat", lambda: chat().choices[0].message.content)
attempt("stream", lambda: [each.choices[0].delta.content for each in chat(stream=True)])
attempt("a conversation with tool calls", lambda: chat(messages=CALLED).choices[0].message.content)
attempt(
    "a prompt that is too long is known as such", lambda: told(lambda: chat(messages=long), "ContextWindowExceeded")
)
attempt(
    "a required tool call",
    lambda: chat(tools=[TOOL], tool_choice="required", max_tokens=200).choices[0].message.tool_calls[0].function.name,
)


def agent() -> int:
    """Three calls, each with the results of those before, then an answer."""
    talk: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(LOOPS):
        asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": turn}
        message = chat(messages=talk, max_tokens=200, **asked).choices[0].message
        [call] = message.tool_calls
        result = use(call.function.name, call.function.arguments)
        talk += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert chat(messages=talk, tools=TOOLS, tool_choice="none").choices[0].message.content
    return LOOPS


def streamed_call() -> bool:
    chunks = list(chat(tools=TOOLS, tool_choice="required", max_tokens=200, stream=True))
    [call, *_] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    return bool(use(call.function.name, call.function.arguments))


attempt(
    "response_format with a class",
    lambda: Colour.model_validate_json(chat(response_format=Colour, max_tokens=200).choices[0].message.content),
)
attempt("a required tool call, streamed", streamed_call)
attempt("an agent of three calls", lambda: agent() == LOOPS)
