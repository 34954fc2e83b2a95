"""A tiny model that reasons when it is told to, and tools that a forced call fills in a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from running import Running, running

from tiny import CHAT_TEMPLATE, make_tiny_model

MODEL = "org/tiny"
FLAGS = ("--served-model-name", MODEL, "--max-length", "2048", "--kv-tokens", "8192")
TEMPLATE = CHAT_TEMPLATE.replace(
    "<|begin|>assistant\n{%",
    "<|begin|>assistant\n{% if enable_thinking %}<think>\n{% else %}<think></think>\n{% endif %}{%",
).replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}",
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def make_model(folder: Path) -> Path:
    assert "enable_thinking" in TEMPLATE
    return make_tiny_model(folder / "tiny", chat_template=TEMPLATE, max_position_embeddings=2048)


@contextmanager
def serving(folder: Path) -> Iterator[Running]:
    """A server with the model."""
    with running(make_model(folder), *FLAGS) as started:
        yield started


def wrong_bodies(body: dict[str, Any], fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """The body with a wrong value, of every kind, in each of the fields."""
    wrong: tuple[Any, ...] = (7, "text", True, [7], [[]], [{}], {"type": 7}, [{"type": "x"}], {"": None}, [{"role": 3}])
    return [{**body, name: value} for name in fields for value in wrong]
