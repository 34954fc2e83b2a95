"""instructor: objects out of answers; it needs tools or structured output, which are not there yet."""

from __future__ import annotations

from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel
from trying import MESSAGES, MODEL, URL, attempt, told


class Colour(BaseModel):
    """A colour."""

    name: str


def ask(mode: Any, kind: Any) -> Any:
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=kind, max_retries=0, max_tokens=32
    )


attempt("free text", lambda: ask(instructor.Mode.TOOLS, None).choices[0].message.content)
attempt("tools are refused by name", lambda: told(lambda: ask(instructor.Mode.TOOLS, Colour), "tools is not supported"))
attempt(
    "JSON is refused by name",
    lambda: told(lambda: ask(instructor.Mode.JSON, Colour), "response_format is not supported"),
)
