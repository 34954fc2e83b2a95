"""JSON schemas: objects without other properties than those named, and where a keyword is that cannot be enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from chairlift.core.errors import RequestError

# Keywords with a schema, a list of schemas, or an object of schemas as their value.
_ONE = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedProperties", "unevaluatedItems"),
)
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# With these, an object's properties may be named in more than one place.
_JOINING = frozenset({"$ref", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties", "additionalProperties"})
_QUOTED = re.compile(r'"([^"]+)"')
_DEEPEST = 200
WHITESPACE = r"[ \n\r\t]{1,32}"  # between JSON tokens, as far as there is any: a small model would indent without end
_DIGITS = 4  # 50 ms; each more takes ten times as long


def where(schema: Any, error: str) -> str:
    """Return the place that an error is about as ` (at #/properties/x/not)`, or "" if it is not found.

    >>> where({"properties": {"x": {"items": {"not": {}}}}}, 'Unimplemented keys: ["not"]')
    ' (at #/properties/x/items/not)'
    """
    named: set[Any] = set()
    key = ""
    if error.startswith("Unimplemented keys"):
        named = set(_QUOTED.findall(error))
    elif match := re.match(r"(?:Unknown (format)|Invalid (type)): (.+)", error):
        key, value = match[1] or match[2], match[3]
    elif error.startswith("oneOf"):
        named = {"oneOf"}
    elif "regex" in error:
        named = {"pattern", "patternProperties"}
    for path, part in _parts(schema, "#", 0):
        if key and str(part.get(key)) == value:
            return f" (at {path}/{key})"
        if found := sorted(named & part.keys()):
            return f" (at {path}/{found[0]})"
    return ""


def _parts(schema: Any, path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over a schema and the schemas in it, with their JSON pointers."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return
    yield path, schema
    for name, value in schema.items():
        inside: Iterator[tuple[str, Any]] = iter(())
        if name in _NAMED and isinstance(value, dict):
            inside = ((f"{name}/{_escape(key)}", each) for key, each in value.items())
        elif name in _LIST and isinstance(value, list):
            inside = ((f"{name}/{number}", each) for number, each in enumerate(value))
        elif name in _ONE:
            inside = iter([(name, value)])
        for tail, each in inside:
            yield from _parts(each, f"{path}/{tail}", depth + 1)


def _escape(key: str) -> str:
    shown = json.dumps(key, ensure_ascii=False)[1:-1]
    return shown.replace("~", "~0").replace("/", "~1")


def close(schema: Any) -> Any:
    """Return the schema with no other properties than the named ones in objects that do not say whether others may be.

    Every answer still matches the given schema. With others allowed, a small model adds properties until its tokens are
    used up. A schema that joins others (allOf, or $ref beside more) stays as it is: each part would forbid the rest.

    >>> close({"properties": {"a": {"properties": {"b": {}}}}})["properties"]["a"]["additionalProperties"]
    False
    """
    parts = [part for _, part in _parts(schema, "#", 0)]
    if any("allOf" in part or ("$ref" in part and part.keys() & {"properties", "required"}) for part in parts):
        return schema
    copy = json.loads(json.dumps(schema))
    for _, part in _parts(copy, "#", 0):
        if "properties" in part and not part.keys() & _JOINING:
            part["additionalProperties"] = False
    return copy


def check_multiples(schema: Any) -> None:
    """Refuse a multipleOf with many digits: its automaton has a state for each remainder, and no limit stops it."""
    for path, part in _parts(schema, "#", 0):
        value = part.get("multipleOf")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            digits = Decimal(repr(value)).normalize().as_tuple().digits
            if len(digits) > _DIGITS:
                raise RequestError(f"multipleOf is {value}: use one of at most {_DIGITS} digits (at {path}/multipleOf)")
