"""A request's body: one JSON object with one meaning, or a BodyError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chairlift.serving.body import MAX_DEPTH, BodyError, read_object

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)
OBJECTS = st.dictionaries(TEXT, VALUES)
PIECES = [
    b'"',
    b"\\",
    b":",
    b",",
    b"{",
    b"}",
    b"[",
    b"]",
    b"a",
    b"1",
    b"-",
    b"e9",
    b" ",
    b"\\u003a",
    b"\\u0000",
    b"\xff",
]


@pytest.mark.long
@given(OBJECTS, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([(",", ":"), (" , ", " : ")]))
def test_whatever_json_writes_comes_back(
    value: dict[str, Any], ascii_only: bool, indent: int | None, separators: tuple[str, str]
) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent, separators=separators).encode()
    assert read_object(raw) == value
    assert repr(read_object(raw)) == repr(value), "1 and 1.0 and True are equal, but not the same"


@given(st.binary() | st.lists(st.sampled_from(PIECES)).map(b"".join))
@example(b"{" * 100_000)
@settings(max_examples=1000)
def test_random_bytes_raise_nothing_but_body_errors(raw: bytes) -> None:
    for body in (raw, b'{"a":' + raw + b"}", b'{"a":"' + raw + b'"}'):
        try:
            assert isinstance(read_object(body), dict)
        except BodyError as error:
            assert "\n" not in str(error) and str(error)


@pytest.mark.long
@given(OBJECTS, TEXT, VALUES, VALUES, st.booleans())
def test_a_key_that_comes_twice_is_refused_wherever_it_is(
    outer: dict[str, Any], key: str, first: Any, second: Any, ascii_only: bool
) -> None:
    def write(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii_only)

    pair = f"{{{write(key)}: {write(first)}, {write(key)}: {write(second)}}}"
    body = f'{{"outer": {write(outer)}, "twice": [{pair}]}}'
    with pytest.raises(BodyError, match="occurs twice"):
        read_object(body.encode())


def test_an_escaped_colon_hides_no_duplicate() -> None:
    with pytest.raises(BodyError, match="'a' occurs twice"):
        read_object(rb'{"a": 1, "a": 2, "b": "\u003a"}')
    with pytest.raises(BodyError, match="'a' occurs twice"):
        read_object(rb'{"a": 1, "\u0061": 2}')
    assert read_object(rb'{"a": "\u003A", "b": "\\u003a", "c:": ":"}') == {"a": ":", "b": "\\u003a", "c:": ":"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is empty"),
        (b"  ", "ends before"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b'{"a": NaN}', r"NaN or Infinity \(byte 6\)"),
        (b'{"a": Infinity}', "NaN or Infinity"),
        (b'{"a": -Infinity}', "NaN or Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": -1e999}', "too large"),
        (b'{"a": 9223372036854775808}', "'a' is a whole number beyond 64 bits"),
        (b'{"a": [1, -9223372036854775809]}', "item 1 of a list is a whole number beyond 64 bits"),
        (b'{"a": ["x", 18446744073709551616]}', "item 1 of a list"),
        (b'{"a": ' + b"9" * 4300 + b"}", "beyond 64 bits"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "too large"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'{"\xc0\x80": 1}', "not valid UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not valid UTF-8"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "byte order mark"),
        (rb'{"a": "\ud800"}', "surrogate"),
        (rb'{"a": "\ud800 and more"}', "surrogate"),
        (rb'{"a": "\udc00\ud800 and more"}', "surrogate"),
        (b'{"a": "\x00"}', "not valid JSON"),
        (rb'{"a": "x\u0000"}', "NUL"),
        (rb'{"a": {"\u0000": 1}}', "NUL"),
        (b'{"a": 1} {}', "trailing characters"),
        (b'{"a": 1,}', "trailing comma"),
        (b'{"a": 01}', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": "x', "ends before"),
    ],
)
def test_each_mistake_has_its_words(raw: bytes, message: str) -> None:
    with pytest.raises(BodyError, match=message) as caught:
        read_object(raw)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_text_that_only_looks_like_a_mistake_is_fine() -> None:
    text = 'NaN \\u0000 \\ud800 "a": 1, "a": 2 \N{GRINNING FACE} [[[['
    assert read_object(json.dumps({"a": text}).encode()) == {"a": text}
    edges = {"low": -(2**63), "high": 2**63 - 1, "list": [2**63 - 1, True, None, 1.5]}
    assert read_object(json.dumps(edges).encode()) == edges


@pytest.mark.parametrize(("opened", "closed"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_ends_at_32_levels(opened: bytes, closed: bytes) -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' + opened * (levels - 1) + b"1" + closed * (levels - 1) + b"}"

    assert read_object(nested(MAX_DEPTH))
    for levels in (MAX_DEPTH + 1, 500, 100_000):
        with pytest.raises(BodyError, match="nested too deep: use 32"):
            read_object(nested(levels))


@pytest.mark.long
@given(OBJECTS)
def test_items_are_counted_in_all_lists_and_objects(value: dict[str, Any]) -> None:
    def items(of: Any) -> int:
        inner = list(of.values()) if isinstance(of, dict) else of if isinstance(of, list) else []
        return len(inner) + sum(map(items, inner))

    raw = json.dumps(value).encode()
    assert read_object(raw, max_items=items(value)) == value
    if items(value):
        with pytest.raises(BodyError, match="items in all"):
            read_object(raw, max_items=items(value) - 1)


def test_a_long_text_full_of_commas_is_one_item() -> None:
    text = "[1,2],{3}," * 400_000
    assert read_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    with pytest.raises(BodyError, match="2000003 items in all"):
        read_object(b'{"a": [' + b"[], " * 2_000_001 + b"0]}")
