"""pydantic-ai: agents."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from trying import LOOPS, MODEL, QUESTION, URL, attempt, use


class Colour(BaseModel):
    """A colour."""

    name: str = Field(max_length=12)
    is_warm: bool


model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
agent = Agent(model, model_settings={"max_tokens": 8})
attempt("free text", lambda: agent.run_sync("Name a colour.").output)
attempt(
    "a second turn",
    lambda: agent.run_sync("Another.", message_history=agent.run_sync("A colour.").all_messages()).output,
)
settings = {"max_tokens": 300}
typed = Agent(model, output_type=Colour, model_settings=settings, retries=3)
attempt("an output type, by a tool", lambda: isinstance(typed.run_sync("Name a colour.").output, Colour))
native = Agent(model, output_type=NativeOutput(Colour), model_settings=settings, retries=3)
attempt("an output type, native", lambda: isinstance(native.run_sync("Name a colour.").output, Colour))

calls: list[str] = []
planner = Agent(model, output_type=Colour, model_settings={**settings, "parallel_tool_calls": False}, retries=3)


async def is_there(_context: object, tool: ToolDefinition) -> ToolDefinition | None:
    """Offer the tool until it has been called three times: a small model would call it for ever."""
    return tool if len(calls) < LOOPS else None


@planner.tool_plain(prepare=is_there)
def weather(city: Annotated[str, Field(max_length=12)]) -> str:
    """The weather of a city."""
    calls.append(city)
    return use("weather", {"city": city})


def plan() -> bool:
    """Runs until three calls were made: each reply is a call, of the tool or with the result."""
    while len(calls) < LOOPS:
        assert isinstance(planner.run_sync(QUESTION).output, Colour)
    return True


async def streamed() -> bool:
    async with Agent(model, model_settings={"max_tokens": 8}).run_stream("Name a colour.") as run:
        return bool([text async for text in run.stream_text(delta=True)])


attempt("an agent of three calls with an output type", plan)
attempt("a stream", lambda: asyncio.run(streamed()))
