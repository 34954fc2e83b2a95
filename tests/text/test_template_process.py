"""A chat template runs in a child process: whatever its author wrote, it ends in time, within memory, with a reason."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import pytest

from chairlift.core.errors import RequestError
from chairlift.text.template import render
from chairlift.text.template_process import TemplateProcess, render_confined
from mostly_long import mostly_long
from processes import is_running

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{{ more }}"
HELLO = [{"role": "user", "content": "Zürich 🚡 \ud83d & <b>"}]
SPECIAL = {"bos_token": None, "eos_token": "</s>"}
SECONDS, MEMORY = 2.0, 1 << 28


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(SECONDS, MEMORY)
    yield made
    made.close()


def test_a_prompt_is_the_one_that_is_rendered_in_this_process(process: TemplateProcess) -> None:
    for more in ({}, {"more": {"a": [1, 2.5, None, True]}}, {"add_generation_prompt": False}):
        assert process.render(TEMPLATE, HELLO, **SPECIAL, **more) == render(TEMPLATE, HELLO, **SPECIAL, **more)
    assert process.render(TEMPLATE, (MappingProxyType(HELLO[0]),), **SPECIAL) == render(TEMPLATE, HELLO, **SPECIAL)


DOUBLED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
RUNAWAYS = {
    "a format of a billion spaces": "{{ '%1000000000d' % 1 }}",
    "a text made longer by itself": "{{ ('x' * 100000) | replace('x', 'y' * 100000) | length }}",
    "lists that hold themselves twice": DOUBLED + "{{ ns.x }}",
    "lists that hold themselves twice, compared": DOUBLED.replace("[ns.x, ns.x]", "[ns.x, ns.x] + []")
    + DOUBLED.replace("ns", "other")
    + "{{ ns.x == other.x }}",
    "membership tests in a loop": (
        "{% set x = [['a']] * 900000 %}{% for i in range(5000) %}{% if ['b'] in x %}{% endif %}{% endfor %}"
    ),
    "JSON of lists that hold themselves twice": DOUBLED + "{{ ns.x | tojson }}",
    "a join of joins": "{% set x = ('y' * 10000000) %}{{ [x, x, x, x, x, x, x, x, x, x] * 100 | int | join(x) }}",
    "lists of lists kept": (
        "{% set ns = namespace(x=[]) %}{% for i in range(9000) %}{% set ns.x = ns.x + [[i] * 100000] %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("template", mostly_long(RUNAWAYS.values(), 4), ids=RUNAWAYS)
def test_a_template_that_runs_away_ends_with_a_reason(process: TemplateProcess, template: str) -> None:
    begun = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match="chat template") as caught:
        process.render(template, HELLO, **SPECIAL)
    assert time.monotonic() - begun < 10 * SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "KiB in this process"
    assert "\n" not in str(caught.value)
    assert process.render(TEMPLATE, HELLO, **SPECIAL).startswith("<user>"), "the next is rendered"


DEEP = {
    "conditions": "{% if a %}" * 5000 + "{% endif %}" * 5000,
    "loops": "{% for a in messages %}" * 40 + "{% endfor %}" * 40,
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "signs": "{{ " + "-" * 100_000 + "1 }}",
    "a list in a list, made by a loop": (
        "{% set ns = namespace(x=1) %}{% for i in range(3000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}"
    ),
}


@pytest.mark.parametrize("template", DEEP.values(), ids=DEEP)
def test_a_template_that_is_nested_too_deep_is_refused(process: TemplateProcess, template: str) -> None:
    with pytest.raises(RequestError, match="nested"):
        process.render(template, HELLO, **SPECIAL)
    with pytest.raises(RequestError, match="nested"):
        render(template, HELLO, **SPECIAL)


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def test_a_conversation_that_is_nested_too_deep_is_refused(process: TemplateProcess) -> None:
    shows = "{{ messages[0].arguments | tojson }}"
    assert process.render(shows, [{"arguments": nested(50)}], **SPECIAL) == "[" * 50 + '"x"' + "]" * 50
    for depth in (990, 100_000):
        with pytest.raises(RequestError, match="nested too deep"):
            process.render(shows, [{"arguments": nested(depth)}], **SPECIAL)


def test_a_conversation_that_is_no_plain_data_is_refused(process: TemplateProcess) -> None:
    circle: dict[str, Any] = {"role": "user"}
    circle["content"] = circle
    for messages, why in (([circle], "Circular"), ([{"role": object()}], "is a object"), (3, "not iterable")):
        with pytest.raises(RequestError, match=why):
            process.render(TEMPLATE, messages, **SPECIAL)  # type: ignore[arg-type]


def test_a_child_that_was_killed_is_replaced_and_the_prompt_comes_all_the_same(process: TemplateProcess) -> None:
    process.render(TEMPLATE, HELLO, **SPECIAL)
    assert process._child is not None
    os.kill(process._child.pid, signal.SIGKILL)
    assert process.render(TEMPLATE, HELLO, **SPECIAL) == render(TEMPLATE, HELLO, **SPECIAL)


def test_threads_share_one_child(process: TemplateProcess) -> None:
    def ask(number: int) -> str:
        return process.render("{{ more }}", HELLO, **SPECIAL, more=number)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(200))) == [str(number) for number in range(200)]


def test_a_fork_has_a_child_of_its_own() -> None:
    mine = render_confined(TEMPLATE, HELLO, **SPECIAL)
    fork = os.fork()
    if fork == 0:
        os._exit(0 if render_confined(TEMPLATE, HELLO, **SPECIAL) == mine else 1)
    assert os.waitpid(fork, 0)[1] == 0
    assert render_confined(TEMPLATE, HELLO, **SPECIAL) == mine


@pytest.mark.parametrize("template", ["{{ 1 }}", RUNAWAYS["lists that hold themselves twice"]], ids=["idle", "busy"])
def test_the_child_ends_with_a_parent_that_was_killed(template: str) -> None:
    source = (
        "import time\nfrom chairlift.text.template_process import TemplateProcess\np = TemplateProcess(1.0)\n"
        "p.render('x', [{}], bos_token=None, eos_token=None)\nprint(p._child.pid, flush=True)\n"
        f"p.render({template!r}, [{{}}], bos_token=None, eos_token=None)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.kill()
    deadline = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < deadline, "it has outlived its parent"
        time.sleep(0.05)
