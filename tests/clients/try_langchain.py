"""langchain-openai."""

from __future__ import annotations

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from trying import MODEL, TOOL, URL, attempt


class Colour(BaseModel):
    """A colour."""

    name: str = Field(max_length=12)
    is_warm: bool


model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=8)
called = [
    HumanMessage("How warm is it in Paris?"),
    AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Paris"}, "id": "call_1"}]),
    ToolMessage("21 degrees", tool_call_id="call_1"),
]
plain = OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=8)
attempt("chat", lambda: model.invoke("Name a colour.").content)
attempt("stream", lambda: "".join(chunk.text for chunk in model.stream("Name a colour.")))
attempt("batch of 20", lambda: len(model.batch([f"Name {number} colours." for number in range(20)])) == 20)
attempt("completion", lambda: plain.invoke("Once upon a time"))
attempt("a conversation with tool calls", lambda: model.invoke(called).text)
long = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=200)
bound = long.bind_tools([TOOL], tool_choice="weather")
attempt("bind_tools", lambda: bound.invoke("How warm is it in Paris?").tool_calls[0]["name"] == "weather")
attempt(
    "bind_tools, streamed",
    lambda: sum(bound.stream("How warm is it in Paris?"), AIMessageChunk("")).tool_calls[0]["name"] == "weather",
)
for method in ("json_schema", "function_calling"):
    attempt(
        f"with_structured_output, {method}",
        lambda method=method: isinstance(long.with_structured_output(Colour, method=method).invoke("A colour"), Colour),
    )
