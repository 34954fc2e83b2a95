"""instructor: objects out of answers, with tools and with structured output."""

from __future__ import annotations

from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field
from trying import MESSAGES, MODEL, URL, attempt


class Colour(BaseModel):
    """A colour."""

    name: str = Field(max_length=12)
    is_warm: bool


def ask(mode: Any, kind: Any) -> Any:
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=kind, max_retries=0, max_tokens=200
    )


attempt("free text", lambda: ask(instructor.Mode.TOOLS, None).choices[0].message.content)


class Palette(BaseModel):
    """Some colours."""

    colours: list[Colour] = Field(min_length=1, max_length=2)
    mood: Literal["calm", "loud"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    attempt(f"an object with {mode.name}", lambda mode=mode: isinstance(ask(mode, Colour), Colour))
    attempt(f"a nested object with {mode.name}", lambda mode=mode: isinstance(ask(mode, Palette), Palette))


def partly(mode: Any) -> Any:
    """The last of the partial objects of a stream."""
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    found = client.chat.completions.create_partial(
        model=MODEL, messages=MESSAGES, response_model=Colour, max_retries=0, max_tokens=200
    )
    return list(found)[-1]


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    attempt(f"partial objects with {mode.name}", lambda mode=mode: partly(mode).is_warm in (True, False))
