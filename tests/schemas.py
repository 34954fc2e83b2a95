"""A corpus of JSON schemas: every keyword that can be enforced, alone and in combination, made the same every time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

Schema = dict[str, Any]
WORDS = ["red", "grün", "синий", "青", "a b", 'quo"te', "back\\slash", "tab\there", "émoji 🎈", "x" * 12, "0", "null"]
PATTERNS = [
    "^[a-z]{1,8}$",
    "^[0-9]{3}-[0-9]{4}$",
    "^(yes|no|maybe)$",
    "^[A-Z][a-z]{2,6}( [A-Z][a-z]{2,6})?$",
    "^$|^x+$",
]
PATTERNS += [r"^\d{1,3}\.\d{2}$", r"^[^\s]{1,10}$", "^(ab){1,4}c?$", "^#[0-9a-fA-F]{6}$", "^[\u03b1-\u03c9]{1,5}$"]
FORMATS = ["date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6", "email", "hostname", "uri"]


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False, **more}


def text(most: int = 8, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def strings() -> Iterator[Schema]:
    yield from (text(most) for most in (0, 1, 2, 5, 17))
    yield from (text(most, minLength=least) for least, most in ((1, 1), (1, 3), (4, 4), (2, 20), (0, 6)))
    yield from ({"type": "string", "pattern": pattern} for pattern in PATTERNS)
    yield from ({"type": "string", "format": name, "maxLength": 60} for name in FORMATS[:6])
    yield from ({"type": "string", "format": name} for name in FORMATS[:6])
    yield from ({"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": most} for most in (2, 5, 9))


def numbers() -> Iterator[Schema]:
    for kind, (low, high) in product(
        ("integer", "number"), ((0, 9), (-5, 5), (1, 1), (100, 999), (-1000, -10), (0, 1), (-3, 12345), (7, 8))
    ):
        yield {"type": kind, "minimum": low, "maximum": high}
    for low, high in ((0, 10), (-7, 3), (0, 2), (99, 1001)):
        yield {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
        yield {"type": "number", "exclusiveMinimum": low, "maximum": high}
    yield from (
        {"type": "number", "minimum": low, "maximum": high} for low, high in ((0.5, 0.75), (-1.25, 3.5), (2.0, 2.5))
    )
    yield from ({"type": "integer", "multipleOf": of, "minimum": 0, "maximum": 1000} for of in (2, 3, 5, 10, 25))
    yield from ({"type": "number", "multipleOf": of, "minimum": 0, "maximum": 10} for of in (0.5, 0.25))


def fixed() -> Iterator[Schema]:
    yield from ({"const": value} for value in (1, -2.5, "x", None, True, [], {}, [1, "a", None], {"a": {"b": [False]}}))
    yield from ({"const": word} for word in WORDS)
    yield {"enum": WORDS}
    yield {"enum": [1, 2.5, "three", None, True, [4], {"five": 5}]}
    yield from ({"enum": WORDS[:count]} for count in range(1, 8))
    yield from ({"type": kind} for kind in ("boolean", "null"))
    yield {"type": ["boolean", "null"]}
    yield {"type": ["integer", "null"], "minimum": 0, "maximum": 50}


def arrays() -> Iterator[Schema]:
    items: list[Schema] = [
        {"type": "boolean"},
        {"enum": ["a", "b"]},
        text(3),
        {"type": "integer", "minimum": 0, "maximum": 9},
    ]
    for item, (least, most) in product(items, ((0, 0), (0, 2), (1, 1), (2, 4), (3, 3))):
        yield {"type": "array", "items": item, "minItems": least, "maxItems": most}
    for count in range(1, 4):
        yield {"type": "array", "prefixItems": items[:count], "items": False, "minItems": count}
        yield {
            "type": "array",
            "prefixItems": items[:count],
            "items": {"type": "null"},
            "minItems": count,
            "maxItems": 5,
        }
    for item in items[:3]:
        inner = {"type": "array", "items": item, "minItems": 1, "maxItems": 2}
        yield {"type": "array", "items": inner, "minItems": 1, "maxItems": 2}
        yield {"type": "array", "items": closed({"x": item}), "maxItems": 2}


def objects() -> Iterator[Schema]:
    parts: dict[str, Schema] = {
        "name": text(10),
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "größe": {"type": "number", "minimum": 0, "maximum": 3},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        'key "q"': {"type": "null"},
        "住所": closed({"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}),
    }
    names = list(parts)
    for count in range(1, len(names) + 1):
        chosen = {name: parts[name] for name in names[:count]}
        yield closed(chosen)
        yield closed(chosen, names[: count // 2])
        yield closed(dict(reversed(chosen.items())), names[count - 1 : count])
    yield closed({})
    for most in (0, 1, 2):
        yield {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": most}
    yield {
        "type": "object",
        "patternProperties": {"^[a-c]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    }
    yield {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": {"type": "null"},
        "maxProperties": 2,
    }


def combined() -> Iterator[Schema]:
    options: list[Schema] = [
        {"type": "boolean"},
        text(4),
        {"type": "integer", "minimum": 0, "maximum": 99},
        closed({"a": {"type": "null"}}),
    ]
    for count in (2, 3, 4):
        yield {"anyOf": options[:count]}
        yield {"oneOf": options[:count]}
        yield closed({"value": {"anyOf": options[:count]}, "kind": {"enum": ["x", "y"]}})
    yield {"oneOf": [closed({"kind": {"const": kind}, kind: {"type": "boolean"}}) for kind in ("cat", "dog", "鳥")]}
    yield {"allOf": [{"type": "string"}, {"maxLength": 6}, {"minLength": 2}]}
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]}
    yield {"allOf": [closed({"a": {"type": "boolean"}, "b": {"type": "null"}})]}
    yield {"$defs": {"point": closed({"x": {"type": "integer", "minimum": 0, "maximum": 9}})}, "$ref": "#/$defs/point"}
    yield {
        "definitions": {"p": {"enum": [1, 2]}},
        **closed({"p": {"$ref": "#/definitions/p"}, "q": {"$ref": "#/definitions/p"}}),
    }
    yield {"$ref": "#/$defs/s", "$defs": {"s": {"type": "string", "maxLength": 4}}, "minLength": 1}
    for depth in range(1, 9):
        schema: Schema = {"type": "boolean"}
        for level in range(depth):
            schema = closed({f"level{level}": schema})
        yield schema
    node = closed({"value": {"enum": [0, 1]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})
    yield {"$ref": "#/$defs/node", "$defs": {"node": node}}
    tree = closed(
        {"leaf": {"type": "boolean"}, "of": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}}
    )
    yield {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}


def mixtures(count: int) -> Iterator[Schema]:
    """Objects of properties drawn from all that is above."""
    rng = random.Random(16)
    small = [*strings(), *numbers(), *fixed()]
    for number in range(count):
        drawn = {f"{rng.choice(WORDS[:5])}{place}": rng.choice(small) for place in range(rng.randint(2, 4))}
        schema = closed(drawn, sorted(rng.sample(sorted(drawn), rng.randint(1, len(drawn)))))
        yield (
            schema if number % 3 else {"type": "array", "items": schema, "minItems": 1, "maxItems": 2, "title": "mixed"}
        )


def corpus() -> list[Schema]:
    """All schemas, each once."""
    found = [*strings(), *numbers(), *fixed(), *arrays(), *objects(), *combined()]
    found += mixtures(max(60, 320 - len(found)))
    return list({repr(each): each for each in found}.values())


# Valid JSON schemas with a keyword that cannot be enforced, and where it is.
UNSUPPORTED: list[tuple[Schema, str]] = [
    ({"not": {"type": "string"}}, "#/not"),
    (closed({"a": {"type": "array", "items": {"not": {}}}}), "#/properties/a/items/not"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "#/uniqueItems"),
    ({"anyOf": [{"type": "array", "contains": {"type": "integer"}}, {"type": "null"}]}, "#/anyOf/0/contains"),
    (closed({"x": {"if": {"type": "string"}, "then": {"maxLength": 3}}}), "#/properties/x/if"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "#/propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "unevaluatedProperties": False}}},
        "#/$defs/a/unevaluatedProperties",
    ),
    (closed({"when": {"type": "string", "format": "never"}}), "#/properties/when/format"),
    (closed({"a/b": {"type": "strin"}}), "#/properties/a~1b/type"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "#/oneOf"),
    ({"type": "string", "pattern": "(?=a)b"}, "#/pattern"),
]
