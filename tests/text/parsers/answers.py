"""Answers as models of each family write them, and the messages that they stand for."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    case: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""


Arguments = dict[str, Any]


def dump(arguments: Arguments) -> str:
    return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Family:
    """How a family writes a call, and several of them."""

    call: Callable[[str, Arguments], str]
    opening: str = ""
    between: str = "\n"
    closing: str = ""

    def calls(self, *calls: tuple[str, Arguments]) -> str:
        return self.opening + self.between.join(self.call(*each) for each in calls) + self.closing

    def answers(self) -> list[Answer]:
        """The answers that every family can write."""
        tea = ("search", {"query": "green tea"})
        nested = {
            "city": "Kyoto",
            "days": 0,
            "metric": True,
            "limit": -1.5,
            "filter": {"a": [1, {"b": None}, []], "c": {}},
            "tags": ["}", "]", ")"],
        }
        odd = {"query": "日本 \"é\" \\ 'x' 🎿 a\nb, c=(d) ] } ; <b>"}
        found = [
            ("one call", [tea]),
            ("two calls", [tea, ("now", {})]),
            ("three calls", [("now", {}), tea, ("get_weather", {"city": "Kyoto", "days": 3})]),
            ("nested arguments and numbers", [("get_weather", nested)]),
            ("unicode and escapes", [("search", odd)]),
            ("empty strings", [("search", {"query": ""})]),
        ]
        answers = [
            Answer(case, self.calls(*calls), calls=tuple((name, dump(arguments)) for name, arguments in calls))
            for case, calls in found
        ]
        unknown = self.calls(("launch", {"a": 1}))
        now = (("now", "{}"),)
        return [
            *answers,
            Answer("content only", "Kyoto is <b>lovely</b> [in May].\n", "Kyoto is <b>lovely</b> [in May].\n"),
            Answer("content with brackets", "[1] {2}\n{3}\n[4, 5]\n<x", "[1] {2}\n{3}\n[4, 5]\n<x"),
            Answer("content, then a call", f"Let me look.\n\n{self.calls(('now', {}))}", "Let me look.", now),
            Answer("a call, then content", f"{self.calls(('now', {}))}\n\nDone.\n", "Done.\n", now),
            Answer("unknown tool", unknown, unknown),
            Answer("unknown tool after content", f"So:\n{unknown}", f"So:\n{unknown}"),
        ]


def json_object(key: str) -> Callable[[str, Arguments], str]:
    return lambda name, arguments: dump({"name": name, key: arguments})


HERMES = [
    *Family(
        lambda name, arguments: f"<tool_call>\n{json_object('arguments')(name, arguments)}\n</tool_call>"
    ).answers(),
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


def xml_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def xml_call(name: str, arguments: Arguments) -> str:
    values = "".join(f"<parameter={key}>\n{xml_value(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


QWEN_CODER = [
    *Family(xml_call).answers(),
    *Family(lambda *call: xml_call(*call).replace("tool_call>", "seed:tool_call>")).answers(),
    Answer(
        "values on the line of their markers",
        "<tool_call><function=get_weather><parameter=city> Kyoto </parameter><parameter=days> 3 </parameter>"
        "</function></tool_call>",
        calls=(("get_weather", '{"city": " Kyoto ", "days": 3}'),),
    ),
    Answer(
        "without the outer marker",
        "Sure.\n<function=now>\n</function>\n<function=search>\n<parameter=query>\n3\n</parameter>\n</function>",
        "Sure.",
        (("now", "{}"), ("search", '{"query": "3"}')),
    ),
    Answer(
        "values in Python's words, and of another type",
        "<function=get_weather><parameter=metric>True</parameter><parameter=filter>{'a': None}</parameter>"
        "<parameter=days>three</parameter><parameter=other>7</parameter></function>",
        calls=(("get_weather", '{"metric": true, "filter": {"a": null}, "days": "three", "other": "7"}'),),
    ),
    Answer(
        "markers and line breaks in a value",
        "<function=search><parameter=query>\n\n a < b\n</tool_call>\n\n\n</parameter></function>",
        calls=(("search", r'{"query": "\n a < b\n</tool_call>\n\n"}'),),
    ),
    Answer("no function", "<tool_call>now</tool_call>", "<tool_call>now</tool_call>"),
    Answer(
        "broken between parameters",
        "<function=search><parameter=query>a</parameter>oh</function>",
        "oh</function>",
        (("search", '{"query": "a"'),),
    ),
    Answer(
        "truncated in a string",
        "<tool_call>\n<function=search>\n<parameter=query>\ngreen te",
        calls=(("search", '{"query": "green te'),),
    ),
    Answer(
        "truncated in a number",
        "<function=get_weather><parameter=city>Kyoto</parameter><parameter=days>1",
        calls=(("get_weather", '{"city": "Kyoto", "days": '),),
    ),
]

LLAMA = [
    *Family(json_object("parameters"), between="; ").answers(),
    Answer(
        "after the tag",
        '<|python_tag|>{"name": "now", "parameters": {}};\n{"type": "function", "name": "now", "parameters": {}}',
        calls=(("now", "{}"), ("now", "{}")),
    ),
    Answer(
        "after the tag within a line",
        'I will search. <|python_tag|>{"name": "now", "parameters": {}}',
        "I will search.",
        (("now", "{}"),),
    ),
    Answer(
        "code after the tag",
        '<|python_tag|>brave_search.call(query="tea")',
        '<|python_tag|>brave_search.call(query="tea")',
    ),
    Answer(
        "within a line",
        'Write {"name": "now", "parameters": {}} to call it.',
        'Write {"name": "now", "parameters": {}} to call it.',
    ),
    Answer(
        "calls on lines of their own, and a list",
        '{"name": "now", "parameters": {}}\n {"name": "now", "parameters": {}}\n[{"name": "now"}, {"name": "now"}]',
        calls=(("now", "{}"),) * 4,
    ),
    Answer(
        "a known tool, then an unknown one",
        '{"name": "now", "parameters": {}}; {"name": "launch", "parameters": {}}',
        '; {"name": "launch", "parameters": {}}',
        (("now", "{}"),),
    ),
    Answer("an object that is no call", '{"a": 1}\n{"name": 2}', '{"a": 1}\n{"name": 2}'),
    Answer(
        "truncated in the arguments",
        '{"name": "search", "parameters": {"query": "te',
        calls=(("search", '{"query": "te'),),
    ),
    Answer("truncated after a separator", '{"name": "now", "parameters": {}};', calls=(("now", "{}"),)),
]


def python_call(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


PYTHONIC = [
    *Family(python_call, "[", ", ", "]").answers(),
    *Family(python_call, "<|python_start|>[", ", ", "]<|python_end|>").answers(),
    *Family(python_call, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>").answers(),
    Answer("JSON in the list", '[{"name": "now", "parameters": {}}, now()]', calls=(("now", "{}"),) * 2),
    Answer("one call after the marker", "<|python_start|>now()<|python_end|>", calls=(("now", "{}"),)),
    Answer(
        "other ways to write values",
        r"""[get_weather(city='its \x41\u00e9\U0001f3bf\d', metric=true, tags=("a", 'b',), filter={'a': null,},)]""",
        calls=(("get_weather", r'{"city": "its Aé🎿\\d", "metric": true, "tags": ["a", "b"], "filter": {"a": null}}'),),
    ),
    Answer("half of a surrogate pair", r"[search(query='\ud83d')]", calls=(("search", r'{"query": "\ud83d"}'),)),
    Answer("spaces", "[ now ( ) ,\n search ( query = 'a' ) ]", "[ now ( ) ,\n search ( query = 'a' ) ]"),
    Answer(
        "spaces inside", "[ now( ) ,\n search( query = 'a' ) ]", calls=(("now", "{}"), ("search", '{"query": "a"}'))
    ),
    Answer("positional arguments", "[search('a')]", "[search('a')]"),
    Answer("broken by an expression", "[search(query=a + b)]", "a + b)]", (("search", '{"query": '),)),
    Answer("truncated in a value", "[search(query='te", calls=(("search", '{"query": '),)),
    Answer("truncated between calls", "[now(), sea", ", sea", (("now", "{}"),)),
    Answer("truncated after a call", "[now()", calls=(("now", "{}"),)),
]

MISTRAL = [
    *Family(json_object("arguments"), "[TOOL_CALLS][", ", ", "]").answers(),
    *Family(json_object("arguments"), "[TOOL_CALLS] [", ",", "]").answers(),
    Answer(
        "with ids",
        '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "a1"}, {"name": "now", "arguments": {}, "id": "x"}]',
        calls=(("now", "{}"), ("now", "{}")),
    ),
    Answer("one object", '[TOOL_CALLS]{"name": "now", "arguments": {}}', calls=(("now", "{}"),)),
    Answer("truncated in the list", '[TOOL_CALLS][{"name": "now", "arguments": {}}, ', calls=(("now", "{}"),)),
    Answer("truncated in an object", '[TOOL_CALLS][{"name": "now", "arguments": {', calls=(("now", "{"),)),
    Answer("broken list", '[TOOL_CALLS][{"name": "now", "arguments": {}} oh]', " oh]".strip(), (("now", "{}"),)),
]

MISTRAL_ARGS = [
    *Family(lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{dump(arguments)}", between="").answers(),
    *Family(lambda name, arguments: f"[TOOL_CALLS]{name}[CALL_ID]a1[ARGS]{dump(arguments)}", between="").answers(),
    *Family(lambda name, arguments: f"[TOOL_CALLS]{name}{dump(arguments)}", between="").answers(),
    Answer("no arguments", "[TOOL_CALLS]now[ARGS]", "[TOOL_CALLS]now[ARGS]"),
    Answer("another marker", "[TOOL_CALLS]now[ARG]{}", "[TOOL_CALLS]now[ARG]{}"),
    Answer("truncated", '[TOOL_CALLS]search[ARGS]{"que', calls=(("search", '{"que'),)),
]

BAR, DASH = "\uff5c", "\u2581"


def deepseek(words: str) -> str:
    return f"<{BAR}{words.replace(' ', DASH)}{BAR}>"


def deepseek_call(name: str, arguments: Arguments) -> str:
    return f"{deepseek('tool call begin')}{name}{deepseek('tool sep')}{dump(arguments)}{deepseek('tool call end')}"


def fenced_call(name: str, arguments: Arguments) -> str:
    head = f"{deepseek('tool call begin')}function{deepseek('tool sep')}{name}\n"
    return f"{head}```json\n{dump(arguments)}\n```{deepseek('tool call end')}"


DEEPSEEK = [
    *Family(deepseek_call, deepseek("tool calls begin"), "", deepseek("tool calls end")).answers(),
    *Family(fenced_call, deepseek("tool calls begin"), "\n", deepseek("tool calls end")).answers(),
    Answer("a marker without a call", f"So {deepseek('tool calls end')}", f"So {deepseek('tool calls end')}"),
    Answer(
        "truncated in the fence",
        f"{deepseek('tool call begin')}function{deepseek('tool sep')}now\n```json\n{{}}\n``",
        calls=(("now", "{}"),),
    ),
]


def harmony_call(name: str, arguments: Arguments) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dump(arguments)}<|call|>"


def harmony(*messages: tuple[str, str]) -> str:
    return "<|end|><|start|>assistant".join(f"<|channel|>{channel}<|message|>{body}" for channel, body in messages)


HARMONY = [
    *(each for each in Family(harmony_call, between="<|start|>assistant").answers() if "content" not in each.case),
    Answer("final", harmony(("final", "Kyoto is <b>lovely</b>.\n")) + "<|return|>", "Kyoto is <b>lovely</b>.\n"),
    Answer(
        "reasoning, then the answer",
        harmony(("analysis", "Hm\n"), ("analysis", "so."), ("final", "Yes.")) + "<|return|>",
        "Yes.",
        reasoning="Hm\nso.",
    ),
    Answer(
        "reasoning, a preamble and a call",
        harmony(("analysis", "Hm."), ("commentary", "I look. "))
        + "<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
        "I look.",
        (("now", "{}"),),
        "Hm.",
    ),
    Answer("no format at all", "Hello <|x|> there", "Hello <|x|> there"),
    Answer(
        "call without arguments", "<|channel|>commentary to=functions.now<|message|><|call|>", calls=(("now", "{}"),)
    ),
    Answer("truncated in reasoning", "<|channel|>analysis<|message|>Hm, <|en", reasoning="Hm, <|en"),
    Answer("truncated in a header", "<|channel|>ana", "<|channel|>ana"),
    Answer(
        "truncated in arguments",
        '<|channel|>commentary to=functions.search<|message|>{"query": "gr',
        calls=(("search", '{"query": "gr'),),
    ),
]

ANSWERS = {
    "hermes": HERMES,
    "qwen-coder": QWEN_CODER,
    "llama": LLAMA,
    "json": [*Family(json_object("arguments")).answers(), *Family(json_object("arguments"), "[", ", ", "]").answers()],
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
    "deepseek": DEEPSEEK,
    "deepseek-v3.1": DEEPSEEK,
    "harmony": HARMONY,
}
