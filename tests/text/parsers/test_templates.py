"""Chat templates tell which dialect their models write."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import chairlift.text.parsers
from chairlift.text.parsers import DIALECTS, dialect_of

TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
BAR, DASH = "\uff5c", "\u2581"
# Short templates with the lines in which those of the families differ.
TEMPLATES = {
    "hermes": r"""{{- '<tool_call>\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{{- '}\n</tool_call>' }}""",
    "qwen-coder": r"""{{- '<tool_call>\n<function=' + call.name + '>\n' }}{{- '<parameter=' + name + '>\n' }}""",
    "llama": """{{- '<|start_header_id|>assistant' }}{{- '{"name": "' + name + '", ' }}{{- '"parameters": ' }}""",
    "pythonic": "Respond in the format [func_name1(key=value), func_name2(...)] {{ '<|start_header_id|>' }}",
    "mistral": """{{- "[AVAILABLE_TOOLS]" }}{{- "[TOOL_CALLS][" }}""",
    "mistral-args": "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "deepseek": f"{{{{ '<{BAR}tool{DASH}calls{DASH}begin{BAR}>' + name + '\\n' + '```json' + '\\n' }}}}",
    "deepseek-v3.1": f"{{{{ '<{BAR}tool{DASH}calls{DASH}begin{BAR}>' + name + arguments }}}}",
    "harmony": "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}",
    "json": "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}",
}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_template_tells_its_dialect(name: str) -> None:
    assert dialect_of(TOOLS + TEMPLATES[name]) == name


def test_a_prompt_line_with_escaped_quotes_is_recognised() -> None:
    assert dialect_of(TOOLS + r'{{- "<tool_call>\n{\"name\": <function-name>}" }}') == "hermes"


def test_a_template_without_tools_has_no_dialect() -> None:
    assert dialect_of("{% for message in messages %}{{ message.content }}{% endfor %}") is None


@pytest.mark.parametrize("name", DIALECTS)
def test_markers_that_are_kept_are_those_of_the_format(name: str) -> None:
    form = DIALECTS[name].calls
    fixed = form.trigger + form.opening + form.before + form.after + form.tail + form.between + form.closing
    assert all(len(marker) > 2 for marker in DIALECTS[name].kept)
    assert not form.trigger or form.trigger in DIALECTS[name].kept
    assert fixed


def test_the_examples_in_the_docstrings_run() -> None:
    folder = Path(chairlift.text.parsers.__file__).parent
    tried = 0
    for file in folder.glob("*.py"):
        name = "chairlift.text.parsers" + ("" if file.stem == "__init__" else f".{file.stem}")
        failed, attempted = doctest.testmod(import_module(name))
        assert failed == 0
        tried += attempted
    assert tried >= 5
