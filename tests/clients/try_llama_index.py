"""llama-index, through its client for OpenAI-like servers."""

from __future__ import annotations

from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from trying import LOOPS, MODEL, QUESTION, URL, attempt, use

model = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, max_tokens=8)
messages = [ChatMessage(role="user", content="Name a colour.")]
attempt("chat", lambda: model.chat(messages).message.content)
attempt("stream", lambda: [each.delta for each in model.stream_chat(messages)])
attempt("complete", lambda: model.complete("Name a colour.").text)
plain = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=False, max_tokens=8)
attempt("completion", lambda: plain.complete("Once upon a time").text)


class Colour(BaseModel):
    """A colour."""

    name: str = Field(max_length=12)
    is_warm: bool


class City(BaseModel):
    """Where to look."""

    city: str = Field(max_length=12)


def weather(city: str) -> str:
    """The weather of a city."""
    return use("weather", {"city": city})


long = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=200,
)
tool = FunctionTool.from_defaults(weather, fn_schema=City)


def agent() -> int:
    """Three calls, each with the results of those before, then an answer."""
    talk = [ChatMessage(role="user", content=QUESTION)]
    for _ in range(LOOPS):
        reply = long.chat_with_tools([tool], chat_history=talk, tool_required=True)
        [call] = long.get_tool_calls_from_response(reply)
        result = tool(**call.tool_kwargs).content
        talk.append(reply.message)
        talk.append(ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": call.tool_id}))
    assert model.chat(talk).message.content
    return LOOPS


attempt(
    "a class from a program", lambda: isinstance(long.structured_predict(Colour, PromptTemplate("A colour.")), Colour)
)
attempt("as_structured_llm", lambda: isinstance(long.as_structured_llm(Colour).complete("A colour.").raw, Colour))
attempt("an agent of three calls", lambda: agent() == LOOPS)
