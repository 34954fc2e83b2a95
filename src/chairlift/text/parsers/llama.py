"""Llama 3 and 4: {"name": ..., "parameters": {...}} or a list of calls in Python; and JSON for all other models."""

from chairlift.text.parsers.bare_calls import AROUND, BareCallParser
from chairlift.text.parsers.dialect import Dialect
from chairlift.text.parsers.grammar import CallFormat
from chairlift.text.parsers.keyed_grammar import python_arguments

_KEPT = (*AROUND, *filter(None, AROUND.values()))

LLAMA = Dialect(
    name="llama",
    signs=(("<|start_header_id|>", '"parameters"'), ("<|header_start|>", '"parameters"')),
    kept=_KEPT,
    parser=BareCallParser,
    calls=CallFormat(before='{"name": "', after='", "parameters": ', tail="}", between="; "),
)

PYTHONIC = Dialect(
    name="pythonic",
    signs=(("func_name1(",), ("<|python_start|>",), ("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    kept=_KEPT,
    parser=BareCallParser,
    calls=CallFormat(
        opening="[", before="", after="(", tail=")", between=", ", closing="]", arguments=python_arguments
    ),
)

# For templates that write tools but calls in no format known here: a forced call is JSON, and JSON is read.
JSON = Dialect(
    name="json",
    signs=(("tools",),),
    parser=BareCallParser,
    calls=CallFormat(before='{"name": "', after='", "arguments": ', tail="}", between="\n"),
)
