"""A Jinja sandbox for the templates of model authors, with limits on steps and on the size of values.

Jinja's own sandbox keeps a template from Python's internals, but not from endless loops or filling the memory. Here
every loop item, call and item of a `range` counts against one budget of steps per rendering, and no value may grow past
a limit: such a template is rejected within a second or two, with the reason. One operation can still take hours or all
memory (a format's width, a filter on huge arguments); the process that renders has limits against these
(`template_process.py`, `serving/text_process.py`).
"""

import json
from collections.abc import Iterable, Sized
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn, TypeVar

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Far above real conversations, which have thousands of messages at most; this many steps take a second or two.
MAX_STEPS = 1_000_000
CALL_STEPS = 4  # the time of a call, in loop items
MAX_SIZE = 1 << 24
MAX_BITS = 4096

_steps_left: ContextVar[int] = ContextVar("chat template steps left", default=0)
_SEQUENCES = (str, list, tuple)
T = TypeVar("T")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that transformers renders chat templates in, with limits on time and memory."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters |= {"tojson": _to_json, "metered": _metered, "bounded": _bounded, "concatenated": _concatenated}
        self.globals |= {"raise_exception": _raise, "strftime_now": _now, "range": _range}
        del self.globals["lipsum"]  # writes any amount of text

    def bind(self, tree: nodes.Template) -> nodes.Template:
        """Apply the limits to every loop and concatenation of a parsed template."""
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = self._through("metered", loop.iter)
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [self._through("concatenated", nodes.List(concat.nodes, lineno=concat.lineno))]
        for block in list(tree.find_all(nodes.AssignBlock)):
            block.filter = self._through("bounded", block.filter)
        return tree

    def _through(self, filter: str, node: nodes.Node | None) -> nodes.Filter:
        made = nodes.Filter(node, filter, [], [], None, None, lineno=node.lineno if node else 1)
        made.set_environment(self)
        return made

    def render(self, template: Any, variables: dict[str, Any]) -> str:
        """Render a template of this environment with a new budget of steps; raise an error if the text is too long."""
        _steps_left.set(MAX_STEPS)
        chunks: list[str] = []
        size = 0
        for chunk in template.generate(variables):
            chunks.append(chunk)
            size += len(chunk)
            _limit_size(size)
        return "".join(chunks)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 as Jinja has it
        _spend(CALL_STEPS)
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        # Products and powers are checked before they are computed; a sum is at most twice the limit.
        if operator == "*":
            sequence, count = (left, right) if isinstance(left, _SEQUENCES) else (right, left)
            if isinstance(sequence, _SEQUENCES) and isinstance(count, int):
                _limit_size(len(sequence) * count)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _limit_bits(left.bit_length() * right)
        return _bounded(super().call_binop(context, operator, left, right))


class Generation(Extension):
    """`{% generation %}` marks the assistant's text, for training; for serving it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 as Jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _spend(steps: int) -> None:
    left = _steps_left.get() - steps
    if left < 0:
        raise TemplateRuntimeError(f"it takes more than {MAX_STEPS:,} steps")
    _steps_left.set(left)


def _limit_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateRuntimeError(f"it makes a text or a list of more than {MAX_SIZE:,}")


def _limit_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateRuntimeError(f"it makes a number of more than {MAX_BITS:,} bits")


def _bounded(value: T) -> T:
    if isinstance(value, _SEQUENCES):
        _limit_size(len(value))
    elif isinstance(value, int):
        _limit_bits(value.bit_length())
    return value


# pass_context keeps Jinja from running these filters on constants at compile time, outside of any rendering.
@pass_context
def _metered(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    if isinstance(items, Sized):
        _spend(len(items))
        return items
    paid = []
    for item in items:
        _spend(1)
        paid.append(item)
    return paid


@pass_context
def _concatenated(context: Context, values: Iterable[Any]) -> str:
    return _bounded("".join(map(str, values)))


def _range(*args: int) -> range:
    span = range(*args)
    _spend(len(span))
    return span


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as in training data; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateRuntimeError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
