"""What every `try_*.py` shares: attempts at what a new user of a client would do, and one line of JSON about each.

Only the standard library: each client runs in an environment of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

URL, MODEL = sys.argv[1], sys.argv[2]  # without /v1
MESSAGES = [{"role": "user", "content": "Name a colour."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLED = [
    {"role": "user", "content": "How warm is it in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
]


# An agent's tools: their descriptions for the model, and what they do.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name, description in (("weather", "The weather of a city"), ("people", "How many people live in a city"))
]
QUESTION = "How warm is it in Paris, and how many people live there?"
LOOPS = 3  # calls of an agent


def use(name: str, arguments: str | dict[str, str]) -> str:
    """The result of a call; its arguments must be those that its schema asks for."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert list(given) == ["city"] and len(given["city"]) <= 12, given
    return {"weather": f"21 degrees in {given['city']}", "people": "2,100,000"}[name]


def attempt(what: str, work: Callable[[], object]) -> None:
    """Try it, and say whether it went as it should: `work` returns something true, or raises."""
    try:
        found = work()
        report = {"what": what, "ok": bool(found), "said": repr(found)}
    except BaseException as error:
        report = {"what": what, "ok": False, "said": f"{type(error).__name__}: {error}"}
    report["said"] = " ".join(str(report["said"]).split())[:300]
    print(json.dumps(report), flush=True)


def told(work: Callable[[], object], *words: str) -> str:
    """The words of the error that it must end in, all of `words` among them."""
    try:
        found = work()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        missing = [word for word in words if word not in message]
        if missing:
            raise AssertionError(f"{missing} is not in {message}") from error
        return message
    raise AssertionError(f"it was not refused: {found!r}")


def command(line: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """What a command of this environment prints; an error if it fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        line,
        cwd=folder,
        env={**os.environ, "PATH": path, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=280)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
        raise
    if process.returncode != 0:
        raise AssertionError(f"exit status {process.returncode}: {said[-600:]}")
    return said
