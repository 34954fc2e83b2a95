"""langchain-openai."""

from __future__ import annotations

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from trying import MODEL, TOOL, URL, attempt, told


class Colour(BaseModel):
    """A colour."""

    name: str


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
attempt(
    "bind_tools is refused by name",
    lambda: told(lambda: model.bind_tools([TOOL]).invoke("x"), "tools is not supported"),
)
attempt(
    "with_structured_output is refused by name",
    lambda: told(lambda: model.with_structured_output(Colour).invoke("x"), "not supported"),
)
