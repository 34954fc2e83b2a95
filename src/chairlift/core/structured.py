"""Structured: the form that an answer must have, as plain data; text/grammar.py compiles it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from chairlift.core.errors import RequestError
from chairlift.core.values import show

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
LONGEST = 1 << 18  # characters of a schema, an expression or a grammar


@dataclass(frozen=True, slots=True)
class Structured:
    """What the whole answer must match.

    >>> Structured.of({"regex": "[0-9]+"})
    Structured(kind='regex', source='[0-9]+', is_of_tools=False)
    >>> Structured.of({"json": {"type": "integer"}}).source
    '{"type":"integer"}'
    """

    kind: str
    source: str  # a regular expression, a Lark or GBNF grammar, or JSON: a schema, the choices, or structural tags
    is_of_tools: bool = False  # a grammar of tool calls, for error messages

    def __post_init__(self) -> None:
        if len(self.source) > LONGEST:
            raise RequestError(
                f"{self.what} has {len(self.source):,} characters: use at most {LONGEST:,}, for example with $defs for "
                "what repeats"
            )

    @property
    def what(self) -> str:
        """Its name in error messages."""
        return "tools" if self.is_of_tools else f"structured: {self.kind}"

    @classmethod
    def of(cls, given: Any) -> Structured:
        """Read what a user gives: one of KINDS with its value, or a class with a JSON schema (pydantic)."""
        if isinstance(given, Structured):
            return given
        if callable(schema := getattr(given, "model_json_schema", None)):
            given = {"json": schema()}
        asked = {name: value for name, value in given.items() if value not in (None, False)} if _is_map(given) else {}
        if len(asked) != 1 or not asked.keys() <= set(KINDS):
            raise RequestError(f"structured is {show(given)}: give one of {', '.join(KINDS)} with its value")
        [(kind, value)] = asked.items()
        return cls(kind, _READERS[kind](value))


def _is_map(given: Any) -> bool:
    return isinstance(given, Mapping) and all(isinstance(name, str) for name in given)


def _schema(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structured: json is not valid JSON: {error}") from None
    if not isinstance(value, (Mapping, bool)):
        raise RequestError(f"structured: json is {show(value)}: give a JSON schema, which is an object")
    return _json("json", value)


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured: {name} cannot be written as JSON: {error}") from None


def _object(value: Any) -> str:
    if value is not True:
        raise RequestError(f"structured: json_object is {show(value)}: use true, or json with a schema")
    return ""


def _text(name: str) -> Any:
    def read(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise RequestError(f"structured: {name} is {show(value)}: give a string that is not empty")
        return value

    return read


def _choice(value: Any) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise RequestError(f"structured: choice is {show(value)}: give a list of strings")
    for each in value:
        if not isinstance(each, str) or not each:
            raise RequestError(f"structured: choice has {show(each)}: each must be a string that is not empty")
    return _json("choice", list(dict.fromkeys(cast("Sequence[str]", value))))


def _tags(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structured: structural_tag is not valid JSON: {error}") from None
    match value:
        case {"structures": [*structures], "triggers": [*triggers]} if structures and triggers:
            pass
        case _:
            raise RequestError("structured: structural_tag must be an object with lists of structures and triggers")
    for each in structures:
        match each:
            case {"begin": str(), "end": str(), "schema": dict()}:
                pass
            case _:
                raise RequestError(f"structured: structural_tag has {show(each)}: give begin, schema and end")
    if not all(isinstance(each, str) and each for each in triggers):
        raise RequestError("structured: structural_tag has a trigger that is no text: give strings")
    return _json("structural_tag", value)


_READERS: dict[str, Any] = {
    "json": _schema,
    "json_object": _object,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("grammar"),
    "structural_tag": _tags,
}
