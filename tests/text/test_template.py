"""Chat templates render as transformers renders them, and a bad one harms no other request."""

import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from chairlift.core.errors import RequestError
from chairlift.models.gguf import GgufFile
from chairlift.models.sources import resolve
from chairlift.text.template import render

# Written for these tests, each in the manner of a family of real ones.
CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
TURNS = """\
{{- bos_token }}
{%- set ns = namespace(turn=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {%- if (message.role == 'user') != (ns.turn % 2 == 0) -%}
        {{- raise_exception('roles must alternate') -}}
    {%- endif -%}
    {%- set ns.turn = ns.turn + 1 -%}
    {{- '[' ~ message.role ~ ' ' ~ loop.index0 ~ '] ' ~ message.content | trim ~ eos_token -}}
{%- endfor -%}
{% if add_generation_prompt %}[assistant]{% endif %}
"""
TOOLS = """\
{%- if tools is not none %}
{{- 'Today is ' ~ strftime_now('%Y') ~ '. Tools:\\n' }}
{%- for tool in tools %}
{{- tool | tojson }}
{{ tool.function | tojson(indent=2) }}
{% endfor %}
{%- endif %}
{% for message in messages %}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}<call>{{ call.function.arguments | tojson }}</call>{% endfor %}
{%- elif message.role == 'assistant' %}
{% generation %}
{{ message.reasoning_content }}|{{ message.content.split('</think>')[-1].lstrip('\\n') }}
{% endgeneration %}
{%- else %}<{{ message.role }}>{{ message['content'] }}
{%- endif %}
{% endfor %}
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
"""
PARTS = """\
{% for message in messages %}{{ message.role }}:
{%- if message.content is string %} {{ message.content }}
{%- else %}{% for part in message.content %} {{ part.text | trim }};{% endfor %}{% endif %}
{% endfor %}
"""


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": 'Be "brief" & <kind>.'}
CALL = assistant(
    "", tool_calls=[{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}]
)
CONVERSATIONS = [
    [user("Hi")],
    [SYSTEM, user("  Hi \n")],
    [SYSTEM, user("a"), assistant("b"), user("c")],
    [user("a"), assistant("<think>\nhm\n</think>\n\nyes", reasoning="so"), user("c")],
    [user("weather?"), CALL, {"role": "tool", "content": '{"t": -3}'}],
    [user("a"), user("b")],
]
WEATHER = {"type": "function", "function": {"name": "weather", "description": "How's it <there>, à Genève?"}}


@pytest.fixture(scope="module")
def reference(byte_level_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(byte_level_folder)


def rendered(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return render(template, messages, bos_token="<|begin|>", eos_token="<|end|>", **options)


@pytest.mark.parametrize("template", [CHATML, TURNS, TOOLS, PARTS])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER]}, {"enable_thinking": False}])
def test_a_prompt_is_the_one_transformers_makes(
    reference: PreTrainedTokenizerBase, template: str, messages: list[Any], add_generation_prompt: bool, options: Any
) -> None:
    options = {"add_generation_prompt": add_generation_prompt, **options}
    try:
        expected = reference.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    except Exception:
        with pytest.raises(RequestError):
            rendered(template, messages, **options)
    else:
        assert rendered(template, messages, **options) == expected


@pytest.mark.parametrize("template", [CHATML, TURNS, PARTS])
@pytest.mark.parametrize("opening", ["The answer is", "The answer is ", "  The\n\n", ""])
def test_the_last_message_can_be_left_open(reference: PreTrainedTokenizerBase, template: str, opening: str) -> None:
    messages = [user("What is it?"), assistant(opening)]
    expected = reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True
    )
    assert rendered(template, messages, continue_final_message=True) == expected


def test_a_last_message_that_the_template_rewrites_cannot_be_left_open() -> None:
    with pytest.raises(RequestError, match="rewrites the last message"):
        rendered("{{ messages[-1].content | tojson }}", [user('say "hi"')], continue_final_message=True)
    with pytest.raises(RequestError, match="needs a last message with text"):
        rendered(CHATML, [assistant("x") | {"content": None}], continue_final_message=True)


def test_text_parts_are_joined_for_a_template_that_reads_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert rendered(CHATML, [user(parts)]) == rendered(CHATML, [user("one\ntwo")])
    assert rendered(PARTS, [user(parts)]) == "user: one; two;"


def test_a_string_becomes_a_part_for_a_template_that_reads_only_parts() -> None:
    template = (
        "{% for message in messages %}{% for part in message['content'] %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    assert rendered(template, [user("hello")]) == "hello"
    assert rendered(template, [user("hello"), assistant("go on")], continue_final_message=True) == "hellogo on"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, "loose", {"type": "text"}])
def test_parts_that_are_not_text_are_refused(part: Any) -> None:
    with pytest.raises(RequestError, match="message 1 has a part of type"):
        rendered(CHATML, [SYSTEM, user([{"type": "text", "text": "look:"}, part])])


def test_the_callers_messages_are_left_alone() -> None:
    messages = [user([{"type": "text", "text": "x"}]), assistant("y", reasoning="z")]
    before = repr(messages)
    rendered(PARTS, messages, continue_final_message=True)
    assert repr(messages) == before


def test_a_missing_bos_token_is_empty() -> None:
    template = "{{ bos_token }}{{ 'no' if bos_token is defined else 'none' }}"
    assert render(template, [user("x")], bos_token=None, eos_token=None) == "none"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only\nusers') }}", "only users"),
        ("{% for %}", "cannot be read"),
        ("{{ messages[0].content + 1 }}", "refuses this conversation"),
        ("{{ messages | frobnicate }}", "cannot be read"),
        ("{{ 1 // 0 }}", "refuses this conversation"),
    ],
)
def test_a_template_error_is_one_line_for_the_client(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        rendered(template, [user("x")])
    assert "\n" not in str(caught.value)


def test_an_empty_conversation_or_a_message_that_is_no_object_is_refused() -> None:
    with pytest.raises(RequestError, match="conversation is empty"):
        rendered(CHATML, [])
    with pytest.raises(RequestError, match="message 0 is a str"):
        rendered(CHATML, ["hi"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_cannot_reach_pythons_internals(template: str) -> None:
    with pytest.raises(RequestError):
        rendered(template, [user("x")])


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}",
        "{% for a in 'x' * 2000 %}{% for b in 'x' * 2000 %}{% endfor %}{% endfor %}",
        "{% for a in messages | slice(10 ** 9) %}{% endfor %}",
        "{{ range(10 ** 6) | sum }}{{ range(10 ** 6) | sum }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set s = 'x' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 40,
        "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
        "{{ lipsum(10 ** 9) }}",
    ],
)
def test_a_template_cannot_run_away(template: str) -> None:
    begun = time.perf_counter()
    with pytest.raises(RequestError, match="chat template"):
        rendered(template, [user("x")])
    assert time.perf_counter() - begun < 60  # about a second alone; without bounds these take hours or all memory


def test_a_long_honest_conversation_is_within_the_bounds() -> None:
    turns = [user("word " * 2000), assistant("word " * 2000)] * 250
    assert len(rendered(TURNS, turns)) > 4_000_000
    assert len(rendered(CHATML, [user("x"), assistant("y")] * 20_000)) > 40_000


def test_the_default_models_own_template_is_chatml() -> None:
    template = GgufFile(resolve("smollm2-135m")).metadata["tokenizer.chat_template"]
    assert rendered(template, [SYSTEM, user("Hi")]) == (
        '<|im_start|>system\nBe "brief" & <kind>.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
    )
    assert rendered(template, [user("Hi")]).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )
