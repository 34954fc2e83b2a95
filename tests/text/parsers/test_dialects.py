"""Answers of each family, cut anywhere, give the same content and calls."""

import json

import pytest
from answers import ANSWERS, Answer
from parsing import TOOLS, cuts, parse

from chairlift.text.parsers import DIALECTS, parser_for
from chairlift.text.parsers.events import MessageParser

CASES = [
    pytest.param(dialect, answer, id=f"{dialect}: {answer.case}")
    for dialect, answers in ANSWERS.items()
    for answer in answers
]


def parser_of(dialect: str) -> MessageParser:
    return parser_for(DIALECTS[dialect], TOOLS)


@pytest.mark.parametrize(("dialect", "answer"), CASES)
def test_an_answer_gives_its_message(dialect: str, answer: Answer) -> None:
    message = parse(parser_of(dialect), answer.text)
    assert (message.content, message.calls) == (answer.content, list(answer.calls))
    assert message.reasoning == answer.reasoning
    for _, arguments in () if "truncated" in answer.case or "broken" in answer.case else message.calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("dialect", "answer"), CASES)
def test_where_an_answer_is_cut_changes_nothing(dialect: str, answer: Answer) -> None:
    whole = parse(parser_of(dialect), answer.text)
    for pieces in cuts(answer.text):
        assert parse(parser_of(dialect), *pieces) == whole, pieces


@pytest.mark.parametrize(("dialect", "answer"), CASES)
def test_an_answer_may_end_anywhere(dialect: str, answer: Answer) -> None:
    """The calls of a truncated answer are beginnings of those of the whole answer."""
    whole = parse(parser_of(dialect), answer.text)
    for end in range(len(answer.text)):
        calls = parse(parser_of(dialect), answer.text[:end]).calls
        for (name, arguments), (whole_name, whole_arguments) in zip(calls, whole.calls, strict=False):
            assert name == whole_name
            assert whole_arguments.startswith(arguments)
        assert len(calls) <= len(whole.calls)


def test_every_family_has_answers() -> None:
    assert set(ANSWERS) == set(DIALECTS)
