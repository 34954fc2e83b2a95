"""pydantic-ai: agents."""

from __future__ import annotations

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from trying import MODEL, URL, attempt


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
