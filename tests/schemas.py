"""A corpus of JSON schemas: every keyword that can be enforced, alone and in combination, made the same every time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import jsonschema

Schema = dict[str, Any]
# Not `date`: the grammar allows February 29 in every year.
_FORMATS = jsonschema.FormatChecker(["ipv4", "ipv6", "uuid", "email"])
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


def annotated() -> Iterator[Schema]:
    """Keywords that say nothing about the answer, beside those that do."""
    said: Schema = {
        "title": "An answer",
        "description": "Ответ, 答え",
        "$comment": "for readers",
        "default": "a",
        "examples": ["b", 3],
        "deprecated": False,
        "readOnly": True,
        "writeOnly": False,
        "x-order": 3,
    }
    for base in (text(3), {"type": "integer", "minimum": 1, "maximum": 12}, {"enum": ["a", "b"]}, closed({})):
        yield {**said, **base}
    yield {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.org/a", **text(5)}
    yield text(8, contentEncoding="base64", contentMediaType="application/octet-stream")
    yield {"type": "integer", "format": "int32", "minimum": 0, "maximum": 40}
    yield {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "uniqueItems": False}
    yield {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": True, "maxProperties": 1}


def drafts() -> Iterator[Schema]:
    """Schemas of earlier drafts, with keywords in other forms."""
    draft = "http://json-schema.org/draft-0{}/schema#"
    pair = [{"type": "boolean"}, {"enum": ["a", "b"]}]
    for number in (4, 6, 7):
        schema = {"$schema": draft.format(number), "type": "array", "items": pair, "minItems": 2}
        yield {**schema, "additionalItems": False}
        yield {**schema, "additionalItems": {"type": "null"}, "maxItems": 4}
    bounds = {"minimum": 3, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": True}
    yield {"$schema": draft.format(4), "type": "integer", **bounds}
    yield {"$schema": draft.format(4), "type": "number", **bounds}
    shared = {"definitions": {"a": text(3)}, "properties": {"a": {"$ref": "#/definitions/a"}}, "required": ["a"]}
    yield {"$schema": draft.format(7), "type": "object", "additionalProperties": False, **shared}


def named() -> Iterator[Schema]:
    """Objects by the names of their properties: any, by pattern, by count, required without a schema."""
    yes = {"type": "boolean"}
    yield {"type": "object", "additionalProperties": yes, "minProperties": 1, "maxProperties": 1}
    yield {"type": "object", "required": ["a"], "additionalProperties": yes, "minProperties": 2, "maxProperties": 2}
    yield {"type": "object", "properties": {"a": yes, "b": yes}, "required": ["a", "b"], "minProperties": 2}
    yield {"type": "object", "properties": {"a": yes, "b": yes}, "maxProperties": 2}
    yield {"type": "object", "properties": {"a": yes, "b": yes, "c": yes}, "required": ["a"], "minProperties": 2}
    yield {"type": "object", "properties": {"a": yes}, "required": ["a"], "minProperties": 2, "maxProperties": 2}
    yield {"type": "object", "properties": {"a": yes}, "required": ["a", "b"], "maxProperties": 2}
    yield {"type": "object", "properties": {"a": yes, "b": False}, "additionalProperties": False}
    for pattern in ("^[a-z]{1,4}$", "^x-", "^[0-9]+$", "^é"):
        one: Schema = {"type": "object", "patternProperties": {pattern: {"enum": [1, 2]}}, "maxProperties": 2}
        yield {**one, "additionalProperties": False, "minProperties": 1}
        yield {**one, "additionalProperties": {"type": "null"}}
        yield {**one, "properties": {"OF": yes}, "required": ["OF"], "additionalProperties": False}
    two = {"^a": {"const": 1}, "^b": {"const": 2}}
    yield {"type": "object", "patternProperties": two, "additionalProperties": False, "maxProperties": 3}
    for name in ("", " ", "\t", 'a"b', "\\", "日本語", "🎈", "a" * 60, "$ref", "properties", "\u0001", "\u2028"):
        yield closed({name: {"enum": [0, 1]}})
        yield closed({"kind": {"const": name}, "of": {"enum": [name, None]}})


def joined() -> Iterator[Schema]:
    """Combinations: an answer must match all parts, one of several, or the same part in many places."""
    yes = {"type": "boolean"}
    yield {"type": "object", "properties": {"a": yes}, "anyOf": [{"required": ["a"]}], "additionalProperties": False}
    a, b = ({"type": "object", "properties": {name: yes}, "required": [name]} for name in "ab")
    yield {"allOf": [a, b], "maxProperties": 2}
    yield {"$defs": {"a": a}, "allOf": [{"$ref": "#/$defs/a"}, b], "maxProperties": 2}
    yield {"anyOf": [a, b], "maxProperties": 1}
    yield {"allOf": [{"enum": [1, 2, 3, 4]}, {"enum": [3, 4, 5]}]}
    yield {"allOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer", "minimum": 0, "maximum": 60}
    yield {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string", "maxLength": 6}
    yield {"allOf": [{"anyOf": [{"minimum": 3}, {"maximum": -3}]}], "type": "integer", "minimum": -9, "maximum": 9}
    yield {"enum": [1, "a", None, [1], {"a": 1}], "type": ["string", "array", "null"]}
    yield {"enum": [1, 5, 9], "minimum": 4}
    yield {"type": ["string", "integer", "array"], "maxLength": 2, "minimum": 5, "maximum": 9, "maxItems": 0}
    yield {"oneOf": [{"const": 1}, {"const": "1"}, {"type": "null"}]}
    yield {"oneOf": [text(2), {"type": "array", "items": {"oneOf": [yes, {"type": "null"}]}, "maxItems": 2}]}
    yield closed({"a": True, "b": {"const": 1}}, ["b"])
    yield {"$defs": {"a/b~c": {"enum": [7]}, "a b": {"enum": [8]}}, "anyOf": [{"$ref": "#/$defs/a~1b~0c"}]}
    yield {"$defs": {"a b": {"enum": [8]}}, "$ref": "#/$defs/a%20b"}
    yield {"$defs": {"a": {"$anchor": "here", "enum": [9]}}, "$ref": "#here"}
    yield {"$defs": {"a": {"$defs": {"b": {"enum": [9]}}}}, "$ref": "#/$defs/a/$defs/b"}
    yield closed({"a": {"enum": [1, 2]}, "b": {"$ref": "#/properties/a"}})
    yield {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": yes}, "$ref": "#/$defs/a"}


def recursive() -> Iterator[Schema]:
    """Schemas that contain themselves, each with a short way out."""
    none = {"type": "null"}
    yield closed({"of": {"anyOf": [none, {"$ref": "#"}]}})
    yield {"anyOf": [none, {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}]}
    yield {"anyOf": [{"type": "boolean"}, closed({"not": {"$ref": "#"}}), closed({"all": {"enum": [[]]}})]}
    even, odd = ({"anyOf": [none, closed({"next": {"$ref": f"#/$defs/{name}"}})]} for name in ("odd", "even"))
    yield {"$defs": {"even": even, "odd": odd}, "$ref": "#/$defs/even"}
    term = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"$ref": "#/$defs/sum"}]}
    sum_ = closed({"op": {"enum": ["+", "-"]}, "left": {"$ref": "#/$defs/term"}, "right": {"enum": [0, 1]}})
    yield {"$defs": {"term": term, "sum": sum_}, "$ref": "#/$defs/term"}
    element = closed(
        {"tag": {"enum": ["b", "i"]}, "of": {"type": "array", "items": {"$ref": "#/$defs/e"}, "maxItems": 1}}
    )
    yield {"$defs": {"e": {"anyOf": [text(4), element]}}, "$ref": "#/$defs/e"}


def bounds() -> Iterator[Schema]:
    """Numbers near the ends of their ranges, with and without them."""
    for low, high in ((2**31 - 1, 2**31), (2**53 - 2, 2**53), (-(2**53), 2 - 2**53), (10**15, 10**15 + 9), (-1, 1)):
        yield {"type": "integer", "minimum": low, "maximum": high}
    for low, high in ((0.001, 0.002), (-0.5, -0.25), (1.005, 1.105), (99.9, 100.1), (-1e-3, 1e-3), (1234.5, 1234.5)):
        yield {"type": "number", "minimum": low, "maximum": high}
    for low, high in ((0, 1), (-1, 0), (9, 11), (-100, 100)):
        yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    yield {"type": "integer", "minimum": 0.5, "maximum": 3.5}
    yield {"type": "integer", "exclusiveMinimum": -4, "maximum": -1, "multipleOf": 1}
    yield {"type": "integer", "multipleOf": 7, "exclusiveMinimum": 7, "exclusiveMaximum": 50}
    yield {"type": "integer", "multipleOf": 1000, "minimum": -5000, "maximum": 5000}


def documents() -> Iterator[Schema]:
    """What programs ask for: records to extract, labels, plans, calls."""
    person = closed(
        {
            "name": text(16, minLength=1),
            "born": {"type": "string", "format": "date"},
            "email": {"type": "string", "format": "email", "maxLength": 24},
            "roles": {"type": "array", "items": {"enum": ["admin", "editor", "reader"]}, "minItems": 1, "maxItems": 2},
        },
        ["name", "roles"],
    )
    money = closed({"amount": {"type": "number", "minimum": 0, "maximum": 9999}, "currency": {"enum": ["EUR", "USD"]}})
    yield person
    yield closed({"people": {"type": "array", "items": person, "minItems": 1, "maxItems": 2}})
    item = closed({"sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, "price": money})
    yield closed({"id": {"type": "string", "format": "uuid"}, "items": {"type": "array", "items": item, "maxItems": 2}})
    yield {"$defs": {"money": money}, **closed({"net": {"$ref": "#/$defs/money"}, "tax": {"$ref": "#/$defs/money"}})}
    yield closed({"label": {"enum": ["positive", "neutral", "negative"]}, "score": {"enum": [0, 0.25, 0.5, 0.75, 1]}})
    step = closed({"do": {"enum": ["search", "read", "stop"]}, "why": text(20)})
    yield closed({"steps": {"type": "array", "items": step, "minItems": 1, "maxItems": 3}, "done": {"type": "boolean"}})
    yield {
        "anyOf": [
            closed({"tool": {"const": "weather"}, "city": text(12)}),
            closed({"tool": {"const": "sum"}, "of": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3}}),
        ]
    }
    point = {"type": "array", "prefixItems": [{"type": "number", "minimum": -180, "maximum": 180}] * 2, "minItems": 2}
    yield closed({"type": {"const": "Point"}, "coordinates": {**point, "maxItems": 2}})
    yield closed({"from": {"type": "string", "format": "date-time"}, "at": {"type": "string", "format": "ipv4"}})
    yield closed({"answer": {"type": ["string", "null"], "maxLength": 20}, "confidence": {"enum": ["low", "high"]}})
    yield closed(
        {f"field {number}": {"type": ["boolean", "null"]} for number in range(20)}, [f"field {n}" for n in range(12)]
    )


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


def check(answer: str, schema: Schema) -> None:
    """Raise an error unless an answer is JSON that matches its schema, with the formats that `jsonschema` knows."""
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator(schema, format_checker=_FORMATS).validate(json.loads(answer))


def corpus() -> list[Schema]:
    """All schemas, each once."""
    found = [*strings(), *numbers(), *fixed(), *arrays(), *objects(), *combined()]
    found += [*annotated(), *drafts(), *named(), *joined(), *recursive(), *bounds(), *documents()]
    found += mixtures(60)
    return list({repr(each): each for each in found}.values())


REFUSED: dict[str, Any] = {
    "not": {},
    "if": {"const": 1},
    "then": {"const": 1},
    "else": {"const": 1},
    "contains": {"const": 1},
    "minContains": 1,
    "maxContains": 2,
    "uniqueItems": True,
    "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "dependencies": {"a": ["b"]},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
    "format": "json-pointer",
}

# JSON schemas with a keyword that cannot be enforced, and where it is.
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
    *(({"type": "array", "items": {name: value}}, f"#/items/{name}") for name, value in REFUSED.items()),
    ({"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}, "#/minProperties"),
    (closed({"a": {"type": "number", "multipleOf": 123.456}}), "#/properties/a/multipleOf"),
    ({"$defs": {"a": {"$ref": "https://example.org/schema"}}, "$ref": "#/$defs/a"}, "#/$defs/a/$ref"),
    (closed({"a": {"$ref": "#/$defs/missing"}}), "#/properties/a/$ref"),
    (text(2, minLength=3), "#/minLength"),
    (closed({"a": {}, "b": {}, "c": {}}, ["a"], maxProperties=1), "#/maxProperties"),
    ({"type": "object", "patternProperties": {"^a": {}, "z$": {}}}, "#/patternProperties"),
]
