"""Parsers of a model's answer: content, reasoning and tool calls, streamed; one file per family of models.

A family enters with a file that defines a Dialect and a line in DIALECTS. Modules here work on strings alone.
"""

from collections.abc import Sequence

from chairlift.text.parsers.deepseek import DEEPSEEK, DEEPSEEK_V31
from chairlift.text.parsers.dialect import Dialect
from chairlift.text.parsers.events import MessageParser, PlainText
from chairlift.text.parsers.harmony import HARMONY
from chairlift.text.parsers.hermes import HERMES
from chairlift.text.parsers.llama import JSON, LLAMA, PYTHONIC
from chairlift.text.parsers.mistral import MISTRAL, MISTRAL_ARGS
from chairlift.text.parsers.qwen_coder import QWEN_CODER
from chairlift.text.parsers.reasoning import ReasoningMarkers, ReasoningParser
from chairlift.text.parsers.tools import Tool

# In the order in which they are tried on a chat template.
DIALECTS = {
    dialect.name: dialect
    for dialect in (
        HARMONY,
        DEEPSEEK,
        DEEPSEEK_V31,
        MISTRAL_ARGS,
        MISTRAL,
        QWEN_CODER,
        HERMES,
        LLAMA,
        PYTHONIC,
        JSON,
    )
}


def dialect_of(template: str) -> str | None:
    """Return the name of the dialect that a chat template is written for; None if the template has no tools.

    >>> dialect_of("{% for tool in tools %}...{% endfor %}...[TOOL_CALLS][{{ calls }}]")
    'mistral'
    """
    return next((name for name, dialect in DIALECTS.items() if dialect.matches(template)), None)


def parser_for(
    dialect: Dialect | None,
    tools: Sequence[Tool] = (),
    reasoning: ReasoningMarkers | None = None,
    starts_inside: bool = False,
) -> MessageParser:
    """Return the parser of one answer: reasoning first, then content and calls; without tools, all of it is content.

    >>> parser = parser_for(DIALECTS["hermes"], [Tool("now")])
    >>> parser.feed('It is <tool_call>{"name": "now", "argu')
    [Content(text='It is')]
    >>> parser.feed('ments": {}}</tool_call>'), parser.finish()
    ([CallStart(index=0, name='now'), CallArguments(index=0, text='{}')], [])
    """
    if dialect is not None and dialect.has_channels:
        return dialect.parser(tools)
    parser = dialect.parser(tools) if dialect is not None and tools else PlainText()
    return parser if reasoning is None else ReasoningParser(reasoning, parser, starts_inside)
