"""Whatever a model writes, parsers neither fail nor lose text, and cuts change nothing."""

import time

import pytest
from answers import ANSWERS
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import TOOLS, Message, parse

from chairlift.text.parsers import DIALECTS, parser_for
from chairlift.text.parsers.events import MessageParser
from chairlift.text.parsers.json_text import MAX_DEPTH
from chairlift.text.parsers.reasoning import MARKERS

PLAIN = [
    "\n",
    " ",
    "a",
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    ":",
    ";",
    "=",
    "<",
    ">",
    "1",
    "-",
    "'",
    "é",
    "```json",
]
WORDS = [
    *PLAIN,
    *(marker for dialect in DIALECTS.values() for marker in dialect.kept),
    *(marker for markers in MARKERS for marker in (markers.begin, markers.end)),
    *("<function=now>", "<function=search>", "<parameter=query>", "</parameter>", "</function>"),
    *("now", "search", '"name": "now"', '"arguments": {', '{"name": "search", "parameters": {"query": "', "query="),
    *("analysis", "final", "to=functions.now", "null", "true", "\\ud83d"),
]
# Beginnings of real answers, with anything after them.
BEGINNINGS = st.sampled_from([answer.text for answers in ANSWERS.values() for answer in answers]).flatmap(
    lambda text: st.integers(0, len(text)).map(lambda end: text[:end])
)
ENDS = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=12)
texts = st.tuples(BEGINNINGS | st.just(""), ENDS).map(lambda parts: parts[0] + "".join(parts[1]))
dialects = st.sampled_from(sorted(DIALECTS))


def parser_of(dialect: str, reasoning: bool = False, inside: bool = False) -> MessageParser:
    return parser_for(DIALECTS[dialect], TOOLS, reasoning=MARKERS[0] if reasoning else None, starts_inside=inside)


def pieces_of(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(deadline=None, max_examples=400)
@given(dialects, texts, st.booleans(), st.booleans(), st.data())
def test_any_text_parses_and_cuts_change_nothing(
    dialect: str, text: str, reasoning: bool, inside: bool, data: st.DataObject
) -> None:
    whole = parse(parser_of(dialect, reasoning, inside), text)
    assert parse(parser_of(dialect, reasoning, inside), *pieces_of(data, text)) == whole
    assert parse(parser_of(dialect, reasoning, inside), *text) == whole


@settings(deadline=None, max_examples=400)
@given(dialects.filter(lambda name: name != "harmony"), texts)
def test_text_without_a_call_is_all_content(dialect: str, text: str) -> None:
    message = parse(parser_of(dialect), text)
    if not message.calls:
        assert message == Message(content=text)


@settings(deadline=None, max_examples=200)
@given(dialects.filter(lambda name: name != "harmony"), texts)
def test_without_tools_all_text_is_content(dialect: str, text: str) -> None:
    assert parse(parser_for(DIALECTS[dialect]), text) == Message(content=text)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_deep_nesting_is_not_followed(dialect: str) -> None:
    for answer in ANSWERS[dialect]:
        if answer.case == "one call" and answer.calls:
            for bracket in ("[", '{"a":', "{'a':", "("):
                text = answer.text.replace('"green tea"', bracket * 10_000).replace("'green tea'", bracket * 10_000)
                for _, arguments in parse(parser_of(dialect), text).calls:
                    assert "\\" in arguments or arguments.count(bracket) <= MAX_DEPTH


@pytest.mark.long
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_long_answer_costs_as_much_per_character_as_a_short_one(dialect: str) -> None:
    one = next(answer for answer in ANSWERS[dialect] if answer.case == "one call")
    head, tea, tail = one.text.partition("green tea")
    assert tea

    def seconds(count: int) -> float:
        start = time.process_time()
        for text in (
            head + "te < a " * count + tail,  # a long string in a call
            head.replace("query", "que ry" * count),  # a long key: the call is held, and then is none
            head[:-1] + "{[(<" * count,
            "\n" * count,
            "<tool_" * count,
        ):
            parser = parser_of(dialect)
            for character in text:
                parser.feed(character)
            parser.finish()
        return time.process_time() - start

    seconds(10)
    assert seconds(4000) < 24 * seconds(500), "8 times the characters take 8 times the time, not 64 times"
