"""langchain-openai."""

from __future__ import annotations

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from trying import LOOPS, MODEL, QUESTION, TOOL, TOOLS, URL, attempt, use


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


def agent() -> int:
    """Three calls, each with the results of those before, then an answer."""
    talk = [HumanMessage(QUESTION)]
    calling = long.bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False)
    for _ in range(LOOPS):
        talk.append(calling.invoke(talk))
        [call] = talk[-1].tool_calls
        talk.append(ToolMessage(use(call["name"], call["args"]), tool_call_id=call["id"]))
    assert model.invoke(talk).text
    return LOOPS


attempt("an agent of three calls", lambda: agent() == LOOPS)
responding = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=200, use_responses_api=True)
attempt("the Responses API", lambda: responding.invoke("Name a colour.").text)
attempt(
    "the Responses API, with_structured_output",
    lambda: isinstance(responding.with_structured_output(Colour, method="json_schema").invoke("A colour"), Colour),
)
