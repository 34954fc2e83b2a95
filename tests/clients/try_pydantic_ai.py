"""pydantic-ai: agents."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from trying import MODEL, URL, attempt, told


class Colour(BaseModel):
    """A colour."""

    name: str


model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
agent = Agent(model, model_settings={"max_tokens": 8})
attempt("free text", lambda: agent.run_sync("Name a colour.").output)
attempt(
    "a second turn",
    lambda: agent.run_sync("Another.", message_history=agent.run_sync("A colour.").all_messages()).output,
)
attempt(
    "an output type is refused by name",
    lambda: told(lambda: Agent(model, output_type=Colour).run_sync("Name a colour."), "not supported"),
)
