"""openai: the client that most others are built on."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI, OpenAI
from trying import CALLED, MESSAGES, MODEL, TOOL, URL, attempt, told

client = OpenAI(base_url=f"{URL}/v1", api_key="none")


def chat(**more: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 8, **more})


def stream(**options: bool) -> Any:
    return list(chat(stream=True, stream_options=options))


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
attempt("500 requests at once, default retries", lambda: none_refused(500))
