"""Arguments written as plain text, made JSON by the type that the function's schema gives them."""

from collections.abc import Mapping
from typing import Any

from chairlift.text.parsers.arriving import Write
from chairlift.text.parsers.json_text import is_json, quote
from chairlift.text.parsers.python_text import as_json

_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


class TrimmedText:
    """Passes text on as it arrives, without one line break at its start and one at its end."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._is_start = True
        self._line_break = ""

    def add(self, piece: str) -> None:
        """Add the next piece, which is not empty."""
        if self._is_start:
            piece = piece.removeprefix("\n")
            self._is_start = False
        body = (self._line_break + piece) if piece else self._line_break
        text = body.removesuffix("\n")
        self._line_break = body[len(text) :]
        self._write(text)


def is_string(schema: Any) -> bool:
    """Return whether a schema allows nothing but strings, or says nothing of the type."""
    return types_of(schema) <= {"string"}


def types_of(schema: Any) -> set[str]:
    """Return the JSON types that a schema names; none if it names none at its top or in its alternatives."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {each for each in _list(named) if isinstance(each, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for alternative in _list(schema.get(key)):
            if isinstance(alternative, Mapping):  # one level deep is what schemas of arguments have
                types |= types_of({"type": alternative.get("type"), "enum": alternative.get("enum")})
    if not types and "$ref" in schema:
        types = {"object", "string"}  # a definition elsewhere, most often a model or an enumeration
    return types or {_kind(each) for each in _list(schema.get("enum"))}


def typed(text: str, schema: Any) -> str:
    """Return a text as JSON of a type that the schema allows; as a string if it is of none of them.

    >>> typed("3", {"type": "integer"}), typed("3", {"type": ["string", "null"]}), typed("three", {"type": "integer"})
    ('3', '"3"', '"three"')
    """
    types = types_of(schema)
    value = text.strip()
    found = value if is_json(value) else as_json(value)
    if found is not None and "string" in types:
        kind = _KINDS.get(found[0], "number")
        if kind == "string" or not ({kind, "integer"} if kind == "number" else {kind}) & types:
            found = None
    return quote(text) if found is None else found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    return "boolean" if isinstance(value, bool) else "null" if value is None else "number"
