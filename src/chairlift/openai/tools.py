"""Read the tools of a conversation, and what they require of its answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chairlift.core.errors import RequestError
from chairlift.core.structured import Structured
from chairlift.core.values import show
from chairlift.text.grammar import call_or_json
from chairlift.text.parsers import DIALECTS
from chairlift.text.parsers.grammar import special_ids
from chairlift.text.parsers.tools import Tool
from chairlift.text.tokenizer import Tokenizer

MOST = 128  # tools, as OpenAI allows
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model may call, and whether it must."""

    tools: list[Tool]
    shown: list[dict[str, Any]]  # as the client sent them: the chat template writes them into the prompt
    choice: str = "auto"  # "auto", "required" or "named"
    parallel: bool = True
    named: Sequence[Tool] = field(default=())  # of which it may call: all, or the named one

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice != "auto"


def read_tools(body: Mapping[str, Any]) -> ToolUse | None:
    """Return the tools of a request, or None if it has none or declines them.

    >>> add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    >>> read_tools({"tools": [add], "tool_choice": "required"}).choice
    'required'
    """
    given, choice = body.get("tools"), body.get("tool_choice")
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise RequestError(f"parallel_tool_calls is {show(parallel)}: use true or false")
    if given is None or given == []:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools: send them, or leave tool_choice out")
        return None
    if not isinstance(given, list):
        raise RequestError(f"tools is {show(given)}: use a list of functions")
    if len(given) > MOST:
        raise RequestError(f"tools has {len(given)} entries: send at most {MOST}")
    tools = [_read_tool(each, place) for place, each in enumerate(given)]
    if twice := next((tool.name for tool in tools if sum(each.name == tool.name for each in tools) > 1), None):
        raise RequestError(f"tools has two functions with the name {twice!r}: give each its own name")
    if choice == "none":
        return None
    named = _read_choice(choice, tools)
    kind = "named" if isinstance(choice, dict) else "required" if choice == "required" else "auto"
    return ToolUse(tools, given, kind, parallel is not False and kind != "named", named)


def _read_tool(given: Any, place: int) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or given.get("type", "function") != "function":
        raise RequestError(f"tools[{place}] is {show(given)}: use an object with the type function and a function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise RequestError(f"tools[{place}] has the name {show(name)}: use 1 to 64 letters, digits, _, . and -")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"tools[{place}] has parameters {show(parameters)}: use a JSON schema, which is an object")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"tools[{place}] has strict {show(strict)}: use true or false")
    return Tool(name, parameters or {}, bool(strict))


def _read_choice(choice: Any, tools: list[Tool]) -> list[Tool]:
    match choice:
        case None | "auto" | "required":
            return tools
        case {"type": "function", "function": {"name": name}}:
            if found := [tool for tool in tools if tool.name == name]:
                return found
            names = ", ".join(tool.name for tool in tools)
            raise RequestError(f"tool_choice names {show(name)}, which is not in tools: use one of {names}")
    raise RequestError(
        f'tool_choice is {show(choice)}: use "none", "auto", "required", or an object that names a function'
    )


def enforced(
    use: ToolUse | None, structured: Structured | None, dialect: str, tokenizer: Tokenizer
) -> Structured | None:
    """Return what the answer must match: the format asked for, or a call that tools or tool_choice require."""
    if use is None:
        return structured
    if use.is_forced and structured is not None:
        raise RequestError("tool_choice requires a call, and response_format another answer: leave one of them out")

    required = use.is_forced or structured is not None
    calls = DIALECTS[dialect].grammar(
        use.named, required=required, parallel=use.parallel, special=special_ids(tokenizer)
    )
    if calls is None or structured is None:
        return None if calls is None else Structured("grammar", calls, is_of_tools=True)
    return call_or_json(calls, structured)
