"""openai: the client that most others are built on."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from trying import CALLED, LOOPS, MESSAGES, MODEL, QUESTION, TOOL, TOOLS, URL, attempt, told, use


class Colour(BaseModel):
    """A colour."""

    name: str = Field(max_length=12)
    is_warm: bool
    shades: list[str] = Field(max_length=1)


client = OpenAI(base_url=f"{URL}/v1", api_key="none")


def chat(**more: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 8, **more})


def stream(**options: bool) -> Any:
    return list(chat(stream=True, stream_options=options))


def parsed() -> bool:
    reply = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Colour, max_tokens=300)
    return isinstance(reply.choices[0].message.parsed, Colour)


def parsed_stream() -> bool:
    """The events of a streamed chat: the object at the end is that of the text."""
    asked = {"model": MODEL, "messages": MESSAGES, "response_format": Colour, "max_tokens": 300}
    with client.chat.completions.stream(**asked) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        return events.get_final_completion().choices[0].message.parsed == Colour.model_validate_json(text)


def streamed_calls() -> bool:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=200
    ) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    return all(use(event.name, event.arguments) for event in done) and bool(done)


def agent(stream: bool) -> int:
    """Three calls, each with the results of those before, then an answer."""
    talk: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(LOOPS):
        asked = {"messages": talk, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "seed": turn}
        if stream:
            with client.chat.completions.stream(model=MODEL, parallel_tool_calls=False, **asked) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = chat(parallel_tool_calls=False, **asked).choices[0].message
        [call] = message.tool_calls
        talk.append({"role": "assistant", "content": message.content, "tool_calls": [call.to_dict()]})
        result = use(call.function.name, call.function.arguments)
        talk.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert chat(messages=talk, tools=TOOLS, tool_choice="none").choices[0].message.content
    return sum(message["role"] == "tool" for message in talk)


def flat(tool: Any) -> Any:
    return {"type": "function", **tool["function"]}


def respond(**more: Any) -> Any:
    asked = {"model": MODEL, "input": "Name a colour.", "max_output_tokens": 200, **more}
    return client.responses.create(**asked)


def response_agent() -> int:
    """The same three calls in the Responses API."""
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(LOOPS):
        tools = [flat(tool) for tool in TOOLS]
        reply = respond(input=items, tools=tools, tool_choice="required", parallel_tool_calls=False)
        [call] = [item for item in reply.output if item.type == "function_call"]
        items += [*reply.output, {"type": "function_call_output", "call_id": call.call_id}]
        items[-1]["output"] = use(call.name, call.arguments)
    assert respond(input=items, max_output_tokens=8).output_text
    return LOOPS


def response_parsed() -> bool:
    reply = client.responses.parse(model=MODEL, input="A colour.", text_format=Colour, max_output_tokens=300)
    return isinstance(reply.output_parsed, Colour)


def response_stream() -> bool:
    with client.responses.stream(model=MODEL, input="Name a colour.", max_output_tokens=8) as events:
        kinds = [event.type for event in events]
    return kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


async def at_once(count: int) -> list[BaseException | None]:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as many:
        asking = (
            many.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": f"Name {number} colours."}], max_tokens=4
            )
            for number in range(count)
        )
        return [each for each in await asyncio.gather(*asking, return_exceptions=True) if isinstance(each, Exception)]


def none_refused(count: int) -> str:
    errors = asyncio.run(at_once(count))
    assert not errors, f"{len(errors)} of {count} failed: {errors[0]!r}"
    return f"{count} answered"


long = [{"role": "user", "content": "one two three four five six " * 3000}]
attempt("chat", lambda: chat().choices[0].message.content)
attempt("stream with usage", lambda: stream(include_usage=True)[-1].usage.completion_tokens)
attempt(
    "usage in every chunk",
    lambda: all(each.usage for each in stream(include_usage=True, continuous_usage_stats=True)),
)
attempt("completion", lambda: client.completions.create(model=MODEL, prompt="Once", max_tokens=8).choices[0].text)
attempt("models", lambda: [each.id for each in client.models.list()] == [MODEL])
attempt("a conversation with tool calls", lambda: chat(messages=CALLED).choices[0].message.content)
attempt('tools with tool_choice "none"', lambda: chat(tools=[TOOL], tool_choice="none").choices[0].message.content)
attempt(
    "a required tool call",
    lambda: chat(tools=[TOOL], tool_choice="required", max_tokens=200).choices[0].message.tool_calls[0].function.name,
)
for field, value in {
    "guided_json": {"enum": ["red", "blue"]},
    "guided_choice": ["red", "blue"],
    "structured_outputs": {"choice": ["red", "blue"]},
}.items():
    attempt(
        field,
        lambda field=field, value=value: (
            chat(extra_body={field: value}).choices[0].message.content.strip(' \n"') in ("red", "blue")
        ),
    )
attempt(
    "chat_template is refused, not ignored",
    lambda: told(lambda: chat(extra_body={"chat_template": "{{ messages }}"}), "chat_template"),
)
attempt("a prompt that is too long has its code", lambda: told(lambda: chat(messages=long), "context_length_exceeded"))
attempt(
    "a base URL without /v1 gets a hint",
    lambda: told(lambda: OpenAI(base_url=URL, api_key="none").models.list(), "/v1/models"),
)
attempt("chat.completions.parse", parsed)
attempt("chat.completions.stream with a class", parsed_stream)
attempt("chat.completions.stream with tools", streamed_calls)
attempt("an agent of three calls", lambda: agent(stream=False) == LOOPS)
attempt("an agent of three calls, streamed", lambda: agent(stream=True) == LOOPS)
attempt("responses.create", lambda: respond().output_text)
attempt("responses.parse", response_parsed)
attempt("responses.stream", response_stream)
attempt("an agent of three calls, responses", lambda: response_agent() == LOOPS)
attempt("500 requests at once, default retries", lambda: none_refused(500))
