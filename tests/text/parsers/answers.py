"""Answers as models of each family write them, and the messages that they stand for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    case: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""


HERMES = [
    Answer("content only", "Kyoto is <b>lovely</b> in May.\n", "Kyoto is <b>lovely</b> in May.\n"),
    Answer(
        "one call",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Kyoto"}}\n</tool_call>',
        calls=(("get_weather", '{"city": "Kyoto"}'),),
    ),
    Answer(
        "two calls",
        '<tool_call>\n{"name": "search", "arguments": {"query": "tea"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        calls=(("search", '{"query": "tea"}'), ("now", "{}")),
    ),
    Answer(
        "content around calls",
        'Let me look.\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n\nOne moment.',
        "Let me look.\n\nOne moment.",
        (("now", "{}"),),
    ),
    Answer(
        "nested arguments, numbers and spaces",
        '<tool_call>{"name":"get_weather","arguments":{ "city" :"X", "limit": -1.5e+3, "metric": true, "days": 0,\n'
        '"filter": {"a": [1, {"b": null}, []], "c": {}}, "tags": ["}", "]"]}}</tool_call>',
        calls=(
            (
                "get_weather",
                '{ "city" :"X", "limit": -1.5e+3, "metric": true, "days": 0,\n'
                '"filter": {"a": [1, {"b": null}, []], "c": {}}, "tags": ["}", "]"]}',
            ),
        ),
    ),
    Answer(
        "unicode and escapes",
        r'<tool_call>{"name": "search", "arguments": {"query": "日本 \"é\" \\ \u00e9 </tool_call> 🎿"}}</tool_call>',
        calls=(("search", r'{"query": "日本 \"é\" \\ \u00e9 </tool_call> 🎿"}'),),
    ),
    Answer(
        "arguments before the name",
        '<tool_call>{"arguments": {"query": "tea"}, "name": "search"}</tool_call>',
        calls=(("search", '{"query": "tea"}'),),
    ),
    Answer(
        "parameters, and further fields",
        '<tool_call>{"id": [1], "name": "search", "parameters": {"query": "a"}, "type": "function"}</tool_call>',
        calls=(("search", '{"query": "a"}'),),
    ),
    Answer(
        "arguments as a string",
        r'<tool_call>{"name": "search", "arguments": "{\"query\": \"a\\nb\"}"}</tool_call>',
        calls=(("search", r'{"query": "a\nb"}'),),
    ),
    Answer("no arguments", '<tool_call>{"name": "now"}</tool_call>', calls=(("now", "{}"),)),
    Answer("null arguments", '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=(("now", "{}"),)),
    Answer(
        "a line break in a string",
        '<tool_call>{"name": "search", "arguments": {"query": "a\nb\tc"}}</tool_call>',
        calls=(("search", r'{"query": "a\nb\tc"}'),),
    ),
    Answer(
        "a brace too few",
        '<tool_call>{"name": "now", "arguments": {}</tool_call> Done.',
        "Done.",
        (("now", "{}"),),
    ),
    Answer(
        "unknown tool",
        '<tool_call>\n{"name": "launch", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "launch", "arguments": {"a": 1}}\n</tool_call>',
    ),
    Answer(
        "unknown tool, arguments first",
        '<tool_call>{"arguments": {"a": 1}, "name": "launch"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": "launch"}</tool_call>',
    ),
    Answer("no name", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>'),
    Answer("no object", "<tool_call>[1, 2]</tool_call>", "<tool_call>[1, 2]</tool_call>"),
    Answer(
        "arguments that are no object",
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
    ),
    Answer(
        "broken before the arguments",
        '<tool_call>{"name": "now", arguments: {}}</tool_call>',
        '<tool_call>{"name": "now", arguments: {}}</tool_call>',
    ),
    Answer(
        "broken within the arguments",
        '<tool_call>{"name": "search", "arguments": {"query": tea!}}</tool_call>',
        "!}}</tool_call>",
        (("search", '{"query": tea'),),
    ),
    Answer(
        "a call after broken text",
        '<tool_call>oh <<tool_call><tool_call>{"name": "now"}</tool_call>',
        "<tool_call>oh <<tool_call>",
        (("now", "{}"),),
    ),
    Answer("truncated in the marker", "Well <tool_c", "Well <tool_c"),
    Answer("truncated in the name", '<tool_call>\n{"name": "get_w', '<tool_call>\n{"name": "get_w'),
    Answer(
        "truncated in the arguments",
        '<tool_call>{"name": "search", "arguments": {"query": "te',
        calls=(("search", '{"query": "te'),),
    ),
    Answer(
        "truncated in the closing marker",
        '<tool_call>{"name": "now", "arguments": {}}\n</tool',
        calls=(("now", "{}"),),
    ),
]

ANSWERS = {"hermes": HERMES}
