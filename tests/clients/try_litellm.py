"""litellm, as a provider of OpenAI's kind."""

from __future__ import annotations

from typing import Any

import litellm
from trying import CALLED, MESSAGES, MODEL, TOOL, URL, attempt, told


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
