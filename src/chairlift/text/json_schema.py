"""JSON schemas: prepares them for llguidance, refuses what it would not enforce, and finds the place of its errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from decimal import Decimal
from math import inf, lcm
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
# A value must match what the first lead to, and what the others say beside them.
_CHOOSING = frozenset({"$ref", "anyOf", "oneOf"})
_LIMITING = frozenset({"multipleOf", "properties", "additionalProperties", "items", "prefixItems", "additionalItems"})
_WITHOUT_EFFECT = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
_COUNTS = ("minProperties", "maxProperties")
_QUOTED = re.compile(r'"([^"]+)"')
_PART = re.compile(r"%json\s*")  # before a schema in a grammar
_JSON = json.JSONDecoder()
_DEEPEST = 200
WHITESPACE = r"[ \n\r\t]{1,32}"  # between JSON tokens, as far as there is any: a small model would indent without end
_ESCAPES = 'nrtbf\\"'
_CONTROL = re.compile(r"\\[uxc0]")  # in a schema as JSON: a control character, or an expression that may be one
_DIGITS = 4  # 50 ms; each more takes ten times as long


def options_of(schema: Any, *, lenient: bool = False) -> dict[str, Any]:
    r"""Return llguidance's options for a schema.

    An answer has no \uXXXX unless the schema has control characters: as an escape, the name of a property would count
    as that of another one.
    """
    escapes = _ESCAPES + "u" if _CONTROL.search(json.dumps(schema, ensure_ascii=False)) else _ESCAPES
    return {"whitespace_pattern": WHITESPACE, "lenient": lenient, "json_allowed_escapes": escapes}


def where(schema: Any, error: str) -> str:
    """Return the place that an error is about as ` (at #/properties/x/not)`, or "" if it is not found.

    >>> where({"properties": {"x": {"items": {"not": {}}}}}, 'Unimplemented keys: ["not"]')
    ' (at #/properties/x/items/not)'
    >>> where({"items": {"minLength": 3, "maxLength": 2}}, "minLength (3) is greater than maxLength (2)")
    ' (at #/items/minLength)'
    """
    is_meant = _reader_of(error)
    for path, part in _parts(schema, "#", 0):
        for key, value in sorted(part.items()):
            if is_meant(key, value):
                return f" (at {path}/{key})"
    return ""


def _reader_of(error: str) -> Callable[[str, Any], bool]:
    """Return whether an error is about a keyword with a value."""
    if error.startswith("Unimplemented keys"):
        keys = set(_QUOTED.findall(error))
        return lambda key, _: key in keys
    if match := re.search(r"Unknown (format)|Invalid (type)|for '(.+)', got|(\w+) \((.+)\) is greater", error):
        named = next(filter(None, match.groups()))
        shown = match[5] or error[match.end() :].lstrip(": ")
        return lambda key, value: key == named and shown in (value, json.dumps(value))
    if match := re.match(r"(?:Pointer|Anchor|Resource) '#?(?:json-schema:///)?(.+?)' ", error):
        target = match[1]
        return lambda key, value: key == "$ref" and isinstance(value, str) and value.lstrip("#") == target
    if match := re.match(r"(\w+) must be an? (array|object|string)", error):
        wrong, kind = match[1], {"array": list, "object": dict, "string": str}[match[2]]
        return lambda key, value: key == wrong and not isinstance(value, kind)
    if error.startswith("min/maxProperties"):
        return lambda key, _: key in _COUNTS
    if error.startswith("oneOf"):
        return lambda key, _: key == "oneOf"
    return lambda key, _: "regex" in error and key in ("pattern", "patternProperties")


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


def _objects(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over all objects in a schema, with their JSON pointers: a $ref may make a schema of any of them."""
    if depth > _DEEPEST or not isinstance(value, (dict, list)):
        return
    if isinstance(value, dict):
        yield path, value
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inside:
        yield from _objects(each, f"{path}/{_escape(str(key))}", depth + 1)


def _escape(key: str) -> str:
    shown = json.dumps(key, ensure_ascii=False)[1:-1]
    return shown.replace("~", "~0").replace("/", "~1")


def prepare(schema: Any) -> Any:
    """Return the schema to compile; RequestError if not every answer would match the given one."""
    check_multiples(schema)
    closed = close(schema)
    check_counts(closed)
    return closed


def close(schema: Any) -> Any:
    """Return the schema without keywords that change nothing, and with closed objects.

    Objects that do not say whether other properties may be get none but those that they name: every answer still
    matches the given schema, and a small model does not add properties until its tokens are used up. A schema that
    joins others (allOf, or $ref beside more) stays open: each part would forbid the rest.

    >>> close({"properties": {"a": {"properties": {"b": {}}}}})["properties"]["a"]["additionalProperties"]
    False
    """
    copy = json.loads(json.dumps(schema))
    parts = [part for _, part in _parts(copy, "#", 0)]
    joins = any("allOf" in part or ("$ref" in part and part.keys() & {"properties", "required"}) for part in parts)
    for part in parts:
        for key, value in _WITHOUT_EFFECT.items():
            if part.get(key) is value:
                del part[key]
        if not joins and isinstance(part.get("properties"), dict) and not part.keys() & _JOINING:
            _close(part)
    return copy


def _close(part: dict[str, Any]) -> None:
    """Name all properties of an object, and leave out bounds of their number that any answer holds."""
    named, required = part["properties"], _names(part.get("required"))
    names = named.keys() | required
    least, most = (part.get(key) if isinstance(part.get(key), int) else None for key in _COUNTS)
    if least is not None and least > len(names):
        return  # it needs others
    part["properties"] = {**named, **{name: {} for name in sorted(required - named.keys())}}
    part["additionalProperties"] = False
    if least is not None and least <= len(required):
        del part["minProperties"]
    if most is not None and most >= len(names):
        del part["maxProperties"]


def _names(required: Any) -> set[str]:
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def check_parts(grammar: str) -> None:
    """Refuse a grammar in Lark's notation that has a schema which would be refused by itself."""
    for match in _PART.finditer(grammar):
        try:
            schema, _ = _JSON.raw_decode(grammar, match.end())
        except (ValueError, RecursionError):
            continue  # llguidance cannot read it either, or it is no schema: a part of a string or a comment
        check_multiples(schema)
        check_counts(schema)


def check_counts(schema: Any) -> None:
    """Refuse a minProperties that answers could miss: a grammar does not see that a key it has no name for repeats."""
    for path, part in _objects(schema, "#"):
        least = part.get("minProperties")
        are_all_named = part.get("additionalProperties") is False and "patternProperties" not in part
        if not isinstance(least, int) or are_all_named:
            continue
        most = 1 + len(_names(part.get("required")))
        if least > most:
            raise RequestError(
                f"minProperties is {least}, and properties without a name might repeat: use at most {most}, one more "
                f"than are required, or name all properties (at {path}/minProperties)"
            )


def check_multiples(schema: Any) -> None:
    """Refuse a multipleOf that is not above 0, or has many digits, alone or together with others.

    Its automaton has a state for each remainder, and no limit of llguidance stops it. Where parts of the schema are
    joined, one number may have to be a multiple of several, so of their least common multiple: all are counted.
    """
    parts = list(_objects(schema, "#"))
    found: dict[Decimal, str] = {}  # with a place of each
    for path, part in parts:
        value = part.get("multipleOf")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if not 0 < value < inf:
            raise RequestError(f"multipleOf is {value}: use a number above 0 (at {path}/multipleOf)")
        number = Decimal(repr(value)).normalize()
        if not _have_few_digits([number]):
            raise RequestError(f"multipleOf is {value}: use one of at most {_DIGITS} digits (at {path}/multipleOf)")
        found[number] = path
    if any(_joins(part) for _, part in parts) and not _have_few_digits(found):
        raise RequestError(
            f"multipleOf has {len(found)} values, which may apply to one number, since the schema joins others: use "
            f"values with a common multiple of at most {_DIGITS} digits (at {list(found.values())[-1]}/multipleOf)"
        )


def _joins(part: dict[str, Any]) -> bool:
    """Whether one value may have to match several of the schemas in a part."""
    keys = part.keys()
    return bool(keys & {"allOf", "patternProperties"} or (keys & _CHOOSING and keys & _LIMITING))


def _have_few_digits(numbers: Collection[Decimal]) -> bool:
    """Whether their least common multiple has, without zeros at its end, few digits."""
    exponent = min((int(number.as_tuple().exponent) for number in numbers), default=0)
    common = 1
    for number in numbers:
        common = lcm(common, int(number.scaleb(-exponent)))
        digits = common
        while digits % 10 == 0:
            digits //= 10
        if digits >= 10**_DIGITS:
            return False
    return True
