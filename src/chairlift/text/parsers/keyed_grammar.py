"""Grammars of arguments that are written one by one: as XML-like parameters, or as Python keywords.

Each argument matches its own schema, in the order of the schema's properties. Conditions on all arguments together
(anyOf, dependentRequired, further properties) are not part of these grammars.
"""

from collections.abc import Mapping
from typing import Any

from chairlift.text.parsers.grammar import Lark, arguments_schema, json_value, literal
from chairlift.text.parsers.tools import Tool
from chairlift.text.parsers.typed_text import types_of

_DEFINITIONS = ("$defs", "definitions")
_VALUE_END = "</parameter>"


def xml_arguments(lark: Lark, tool: Tool, name: str, by_schema: bool) -> str:
    """Return the expression for <parameter=key> lines; strings are free text up to the closing marker."""
    if not by_schema:
        return f"{_any_parameter(lark, name)}*"
    parts = []
    for index, (key, schema, is_required) in enumerate(_properties(tool)):
        value = _xml_value(lark, schema, f"{name}_value_{index}", tool.strict)
        parameter = lark.rule(f"{name}_{index}", literal(f"<parameter={key}>\n"), value, literal("\n"))
        parts.append(parameter if is_required else f"{parameter}?")
    return " ".join(parts)


def python_arguments(lark: Lark, tool: Tool, name: str, by_schema: bool) -> str:
    """Return the expression for key=value, key=value; values are JSON, except for Python's True and False."""
    if not by_schema:
        return f"({_any_keyword(lark, name)} ({literal(', ')} {name}_any)*)?"
    properties = _properties(tool)
    # `after_i` has the arguments from i on when one precedes them, `from_i` when none does.
    after, from_here = lark.rule(f"{name}_after_{len(properties)}"), lark.rule(f"{name}_from_{len(properties)}")
    for index, (key, schema, is_required) in reversed(list(enumerate(properties))):
        value = '"True" | "False"' if schema.get("type") == "boolean" else json_value(schema, tool.strict)
        value = lark.rule(f"{name}_value_{index}", value)
        argument = lark.rule(f"{name}_{index}", literal(f"{key}="), value)
        first = f"{argument} {after}"
        more = f"{literal(', ')} {argument}"
        after = lark.rule(f"{name}_after_{index}", more if is_required else f"({more})?", after)
        from_here = lark.rule(f"{name}_from_{index}", first if is_required else f"{first} | {from_here}")
    return from_here


def _properties(tool: Tool) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return the key and schema of each argument, and whether it is required; definitions go with each schema."""
    whole = arguments_schema(tool)
    shared = {key: whole[key] for key in _DEFINITIONS if key in whole}
    listed = whole.get("required")
    required = listed if isinstance(listed, list) else []
    return [
        (key, {**schema, **shared} if isinstance(schema, Mapping) else shared, key in required)
        for key, schema in tool.properties.items()
    ]


def _xml_value(lark: Lark, schema: Mapping[str, Any], name: str, strict: bool) -> str:
    """Return the expression for a value and the marker after it; text that may be a string is not checked."""
    types = types_of(schema)
    if types and "string" not in types:
        return lark.rule(name, json_value(schema, strict), literal("\n" + _VALUE_END))
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(allowed, list) and allowed and all(isinstance(each, str) for each in allowed):
        return lark.rule(name, " | ".join(literal(f"{each}\n{_VALUE_END}") for each in allowed))
    return lark.until(name, _VALUE_END)


def _any_parameter(lark: Lark, name: str) -> str:
    value = lark.until(f"{name}_value", _VALUE_END)
    return lark.rule(f"{name}_any", literal("<parameter="), r"/[^<>\n]+/", literal(">\n"), value, literal("\n"))


def _any_keyword(lark: Lark, name: str) -> str:
    value = f'({json_value({}, False)} | "True" | "False" | "None")'
    return lark.rule(f"{name}_any", r"/[A-Za-z_][A-Za-z0-9_]*=/", value)
