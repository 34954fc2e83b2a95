"""Grammars accept the calls that they must force and no others, and the parsers read what the grammars accept."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import pytest
from llguidance import LLMatcher, LLTokenizer
from parsing import NOW, SEARCH, WEATHER, parse

from chairlift.text.parsers import DIALECTS, parser_for
from chairlift.text.parsers.dialect import Dialect
from chairlift.text.parsers.tools import Tool

KYOTO = {"city": "Kyoto", "days": 3, "metric": True}
STRICT = [Tool(tool.name, tool.parameters, strict=True) for tool in (WEATHER, SEARCH, NOW)]
LOOSE = [WEATHER, SEARCH, NOW]


class ByteVocabulary:
    """A tokenizer with bytes as tokens, and markers as special tokens or not at all."""

    def __init__(self, markers: Sequence[str]) -> None:
        self.eos_token_id, self.bos_token_id = 256, None
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>", *(marker.encode() for marker in markers)]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.ids = {marker: 257 + index for index, marker in enumerate(markers)}

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.tokens[id] for id in ids).decode()

    def encode(self, text: str) -> list[int]:
        for marker, id in self.ids.items():
            head, found, rest = text.partition(marker)
            if found:
                return [*self.encode(head), id, *self.encode(rest)]
        return list(text.encode())


@pytest.fixture(params=["markers are text", "markers are special tokens"])
def vocabulary_of(request: pytest.FixtureRequest) -> Callable[[Dialect], ByteVocabulary]:
    return lambda dialect: ByteVocabulary(dialect.kept if "special" in request.param else ())


class Checker:
    """Tells whether a grammar accepts a text as a whole."""

    def __init__(self, vocabulary: ByteVocabulary, grammar: str | None) -> None:
        assert grammar is not None
        self._vocabulary = vocabulary
        self._matcher = LLMatcher(LLTokenizer(llguidance.TokenizerWrapper(vocabulary)), grammar)
        assert not self._matcher.is_error(), self._matcher.get_error() + grammar

    def walk(self, choose: random.Random, length: int = 1500) -> str | None:
        """Return a random text that the grammar accepts, or None if it has no end within the length."""
        self._matcher.reset()
        ids: list[int] = []
        while len(ids) < length:
            bias = self._matcher.compute_logit_bias()
            valid = [id for id, value in enumerate(bias) if value]
            if self._vocabulary.eos_token_id in valid and (len(valid) == 1 or choose.random() < 0.3):
                return self._vocabulary.decode(ids)
            if choose.random() < 0.1 and self._matcher.validate_tokens(list(b"\n</parameter>")) == 13:
                ids += b"\n</parameter>"  # the end of free text, which chance does not find
                assert self._matcher.consume_tokens(list(b"\n</parameter>"))
                continue
            allowed = [id for id in valid if id > 256 or 32 <= id < 127 or id == 10] or valid
            closing = [id for id in allowed if id > 256 or chr(id) in '"}])\n</']
            allowed = closing if closing and choose.random() < 0.6 else allowed
            ids.append(choose.choice([id for id in allowed if id != self._vocabulary.eos_token_id]))
            assert self._matcher.consume_token(ids[-1])
        return None

    def accepts(self, text: str) -> bool:
        self._matcher.reset()
        ids = self._vocabulary.encode(text)
        return self._matcher.try_consume_tokens(ids) == len(ids) and self._matcher.is_accepting()


def written(dialect: Dialect, *calls: tuple[str, dict[str, Any]]) -> str:
    """Return calls as the format writes them."""
    form = dialect.calls
    repeated = form.trigger if form.repeats else ""
    texts = (
        form.before + name + form.after + arguments_of(dialect, arguments) + form.tail for name, arguments in calls
    )
    return form.trigger + form.opening + (form.between + repeated).join(texts) + form.closing


def arguments_of(dialect: Dialect, arguments: dict[str, Any]) -> str:
    if dialect.name == "pythonic":
        return ", ".join(
            f"{key}={value if isinstance(value, bool) else json.dumps(value, ensure_ascii=False)}"
            for key, value in arguments.items()
        )
    if dialect.name == "qwen-coder":
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in arguments.items()
        }
        return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return json.dumps(arguments, ensure_ascii=False)


each_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


@each_dialect
def test_a_required_call_is_a_call_and_matches_its_schema(dialect: Dialect, vocabulary_of: Any) -> None:
    vocabulary = vocabulary_of(dialect)
    grammar = dialect.grammar(LOOSE, required=True, parallel=False, special=vocabulary.ids.get)
    checker = Checker(vocabulary, grammar)
    for name, arguments in (("get_weather", KYOTO), ("get_weather", {"city": "a"}), ("now", {})):
        assert checker.accepts(written(dialect, (name, arguments))), (name, arguments)
    assert not checker.accepts("Hello.")
    assert not checker.accepts("")
    assert not checker.accepts(written(dialect, ("get_weather", {"days": 3}))), "city is required"
    assert not checker.accepts(written(dialect, ("get_weather", {"city": "Kyoto", "days": "3 days"})))
    assert not checker.accepts(written(dialect, ("launch", {}))), "not one of the tools"
    assert not checker.accepts(written(dialect, ("now", {}), ("now", {}))), "one call"


@each_dialect
def test_a_named_call_is_a_call_of_that_tool(dialect: Dialect, vocabulary_of: Any) -> None:
    vocabulary = vocabulary_of(dialect)
    checker = Checker(vocabulary, dialect.grammar([SEARCH], required=True, special=vocabulary.ids.get))
    assert checker.accepts(written(dialect, ("search", {"query": "日本"})))
    assert not checker.accepts(written(dialect, ("now", {})))


@each_dialect
def test_parallel_calls_are_accepted_and_parsed(dialect: Dialect, vocabulary_of: Any) -> None:
    if dialect.name == "harmony":
        pytest.skip("a call ends the answer")
    vocabulary = vocabulary_of(dialect)
    calls = (("search", {"query": "a"}), ("now", {}), ("get_weather", KYOTO))
    text = written(dialect, *calls)
    for tools, required in ((LOOSE, True), (STRICT, False)):
        checker = Checker(vocabulary, dialect.grammar(tools, required=required, special=vocabulary.ids.get))
        assert checker.accepts(text)
        message = parse(parser_for(dialect, LOOSE), text)
        assert [(name, json.loads(arguments)) for name, arguments in message.calls] == list(calls)
        assert message.content == ""


@each_dialect
def test_free_text_stays_free_and_strict_calls_in_it_match_their_schemas(dialect: Dialect, vocabulary_of: Any) -> None:
    vocabulary = vocabulary_of(dialect)
    tools = [STRICT[0], NOW]
    checker = Checker(vocabulary, dialect.grammar(tools, required=False, special=vocabulary.ids.get))
    talk = "<|channel|>final<|message|>" if dialect.name == "harmony" else ""
    before = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" if talk else "I look.\n"
    for text in ("Hello.", "a\n\n{b} [c] <d>", "日本\n[1] 2"):
        assert checker.accepts(talk + text), text
    good, bad = (written(dialect, ("get_weather", each)) for each in (KYOTO, {"days": 3}))
    assert checker.accepts(good)
    assert checker.accepts(before + good)
    assert not checker.accepts(bad)
    assert not checker.accepts(before + bad)
    assert checker.accepts(written(dialect, ("now", {"any": "thing"}))), "not strict"
    message = parse(parser_for(dialect, tools), before + good)
    assert [(name, json.loads(arguments)) for name, arguments in message.calls] == [("get_weather", KYOTO)]
    assert message.content == "I look."


@each_dialect
def test_without_strict_tools_an_optional_call_needs_no_grammar(dialect: Dialect) -> None:
    assert dialect.grammar(LOOSE, required=False) is None
    assert dialect.grammar([], required=True) is None


@each_dialect
def test_any_text_that_a_grammar_forces_is_parsed_as_calls_that_match_the_schema(
    dialect: Dialect, vocabulary_of: Any
) -> None:
    vocabulary = vocabulary_of(dialect)
    closed = [Tool(tool.name, {**tool.parameters, "additionalProperties": False}) for tool in (WEATHER, SEARCH)]
    checker = Checker(vocabulary, dialect.grammar([*closed, NOW], required=True, special=vocabulary.ids.get))
    schemas = {tool.name: LLMatcher.grammar_from_json_schema(dict(tool.parameters)) for tool in closed}
    schemas["now"] = LLMatcher.grammar_from_json_schema({"type": "object", "additionalProperties": False})
    matchers = {name: Checker(ByteVocabulary(()), schema) for name, schema in schemas.items()}
    found = [text for seed in range(12) if (text := checker.walk(random.Random(seed))) is not None]
    assert len(found) >= 3, "some walks end"
    for text in found:
        message = parse(parser_for(dialect, LOOSE), text)
        assert message.calls
        assert message.content == "", text
        for name, arguments in message.calls:
            ordered = json.dumps(json.loads(arguments), ensure_ascii=False)
            assert matchers[name].accepts(ordered), (text, arguments)


ODD_SCHEMAS: list[dict[str, Any]] = [
    {"type": "string"},
    {"required": 5, "properties": {"a": True, "b": {"type": 7}, "c": {"enum": "x"}}},
    {"properties": {'"\\\n\x00\u2028é<tool_call>': {"type": "string"}, "\ud800": {}}},
    {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "integer"}}, "required": ["a"]},
    {"properties": {"kind": {"enum": ["a", "b"]}, "n": {"const": 3}, "m": {"type": ["integer", "null"]}}},
    {"properties": [], "x-guidance": {"whitespace_pattern": "("}},
]


@each_dialect
@pytest.mark.parametrize("schema", ODD_SCHEMAS)
def test_odd_schemas_make_a_grammar_or_an_error_of_the_matcher(dialect: Dialect, schema: dict[str, Any]) -> None:
    for required in (True, False):
        grammar = dialect.grammar([Tool("f", schema, strict=not required)], required=required)
        assert grammar is not None
        matcher = LLMatcher(LLTokenizer(llguidance.TokenizerWrapper(ByteVocabulary(()))), grammar, log_level=0)
        assert not matcher.is_error() or matcher.get_error()


@each_dialect
def test_definitions_and_enumerations_are_followed(dialect: Dialect) -> None:
    schema = {
        "properties": {"a": {"$ref": "#/$defs/a"}, "kind": {"type": "string", "enum": ["x", "yz"]}},
        "$defs": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    checker = Checker(ByteVocabulary(()), dialect.grammar([Tool("f", schema, strict=True)], required=True))
    assert checker.accepts(written(dialect, ("f", {"a": 1})))
    assert checker.accepts(written(dialect, ("f", {"a": 1, "kind": "yz"})))
    assert not checker.accepts(written(dialect, ("f", {"a": 1, "kind": "z"})))
    assert not checker.accepts(written(dialect, ("f", {"kind": "x"})))
    assert not checker.accepts(written(dialect, ("f", {"a": 1, "b": 2})))
    if dialect.name != "qwen-coder":  # where a definition may be a string, the text is not checked
        assert not checker.accepts(written(dialect, ("f", {"a": "one"})))
