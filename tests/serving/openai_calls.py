"""Calls of OpenAI's Python client that several files of tests make."""

from __future__ import annotations

from typing import Any

from openai import OpenAI
from running import Running

MODEL = "org/tiny"  # a name with a slash, as most have
PROMPT = "The chairlift never stops"
MESSAGES: Any = [{"role": "user", "content": "What is the answer?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
SEEDED: dict[str, Any] = {"seed": 11, "temperature": 1.2, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


def client_of(server: Running, key: str | None = None, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key or server.key, max_retries=0, **options)


def chat(client: OpenAI, **params: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **GREEDY, **params})


def complete(client: OpenAI, **params: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, **GREEDY, **params})


def texts_of(chunks: list[Any]) -> dict[int, str]:
    """What a stream said, by choice."""
    said: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            new = choice.text if hasattr(choice, "text") else choice.delta.content or ""
            said[choice.index] = said.get(choice.index, "") + new
    return said
