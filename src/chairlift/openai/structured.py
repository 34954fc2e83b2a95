"""Read what an answer must match: `structured`, OpenAI's response_format, and vLLM's names for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.core.errors import RequestError
from chairlift.core.structured import KINDS, Structured
from chairlift.core.values import show

# vLLM's older names, one field for each kind.
GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")} | {
    "guided_json_object": "json_object",
    "structural_tag": "structural_tag",
}
FIELDS = frozenset({"response_format", "structured", "structured_outputs", *GUIDED})
# Settings of vLLM's backends, which have no equivalent here; false and null are their defaults.
_BESIDES = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def read_structured(body: Mapping[str, Any]) -> Structured | None:
    """Return what the answer must match, or None.

    >>> read_structured({"response_format": {"type": "json_object"}})
    Structured(kind='json_object', source='', is_of_tools=False)
    >>> read_structured({"guided_choice": ["yes", "no"]})
    Structured(kind='choice', source='["yes","no"]', is_of_tools=False)
    """
    asked: dict[str, dict[str, Any]] = {}
    if (given := body.get("response_format")) is not None:
        asked["response_format"] = _response_format(given)
    for name in ("structured", "structured_outputs"):
        if (given := body.get(name)) is not None:
            asked[name] = _structured_outputs(name, given)
    for name, kind in GUIDED.items():
        if (value := body.get(name)) not in (None, False):
            asked[name] = {kind: value}
    named = [name for name, value in asked.items() if value]
    if len(named) > 1:
        raise RequestError(f"{named[0]} and {named[1]} both say what the answer must match: leave one of them out")
    return _read(named[0], asked[named[0]]) if named else None


def _read(field: str, asked: dict[str, Any]) -> Structured:
    try:
        return Structured.of(asked)
    except RequestError as error:
        raise RequestError(f"{field}: {str(error).removeprefix('structured: ')}") from None


def _response_format(given: Any) -> dict[str, Any]:
    match given:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}} if schema is not None:
            return {"json": schema}
        case {"type": "json_schema"}:
            raise RequestError(
                'response_format has no schema: use {"type": "json_schema", "json_schema": {"schema": {...}}}'
            )
        case {"type": "structural_tag", **tags}:
            return {"structural_tag": tags}
    raise RequestError(
        f"response_format is {show(given)}: use an object of type text, json_object, json_schema or structural_tag"
    )


def _structured_outputs(field: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise RequestError(f"{field} is {show(given)}: use an object with one of {', '.join(KINDS)}")
    for name in _BESIDES:
        if given.get(name):
            raise RequestError(f"{field} has {name}, which is not supported: leave it out")
    return {name: value for name, value in given.items() if name not in _BESIDES and value not in (None, False)}
