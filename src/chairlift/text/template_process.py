"""Chat templates in a child process, with a limit on time and memory: a template is an untrusted program.

The sandbox counts loops and calls, but one operation can take all memory or hours: '%1000000000d' % 1, a list that
contains itself twice, a filter on huge arguments. So a template never runs in the process with the model. One child
renders all templates of this process; it starts with the first and ends with this process. A rendering takes about
0.1 ms longer than in this process.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from chairlift.core.errors import ChairliftError, RequestError
from chairlift.text.confined import OUT_OF_MEMORY, TIMED_OUT, command, confine, deadline, environment
from chairlift.text.frames import read_frame, write_frame
from chairlift.text.template import Message, render

SECONDS = 5.0  # a rendering takes milliseconds; with all steps that the sandbox allows, a second or two
MEMORY = 1 << 29  # bytes
_KILLED = "the process that renders chat templates was killed twice: is the machine short of memory?"


class TemplateProcess:
    """Renders as `template.render` does, in a child process; threads may share it.

    >>> TemplateProcess().render("{{ messages[0].content }}!", [{"content": "Hi"}], bos_token=None, eos_token=None)
    'Hi!'
    """

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._seconds = seconds
        self._memory = memory
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started the child; a fork of it must start its own

    def render(self, template: str, messages: Sequence[Message], /, **options: Any) -> str:
        """Return a conversation as a prompt."""
        try:
            asked = json.dumps([template, list(messages), options], default=_plain).encode()
        except (TypeError, ValueError) as error:
            remedy = "use strings, numbers, lists and dicts"
            raise RequestError(f"the conversation is not plain data: {error}; {remedy}") from None
        except RecursionError:
            raise RequestError("the conversation's lists and dicts are nested too deep: flatten them") from None
        with self._lock:
            text, refusal = self._ask(asked) or self._ask(asked) or (None, _KILLED)
        if text is None:
            raise RequestError(refusal)
        return text

    def close(self) -> None:
        """End the child; the next rendering starts another."""
        child, self._child = self._child, None
        if child is not None and self._owner == os.getpid():
            child.kill()
            child.communicate()

    def _ask(self, asked: bytes) -> tuple[str | None, str] | None:
        """Return the text or an error; None if the child has ended for another reason than the template."""
        child = self._running()
        assert child.stdin is not None and child.stdout is not None
        try:
            write_frame(child.stdin, asked)
            answer = read_frame(child.stdout)
        except BrokenPipeError:
            answer = None
        except BaseException:  # such as Ctrl-C: the next call would read this call's answer
            self.close()
            raise
        if answer is not None:
            text, error = json.loads(answer)
            return text, error
        code = child.wait()
        self.close()
        if code == TIMED_OUT:
            return None, f"the chat template takes longer than {self._seconds:g} s with this conversation: use another"
        if code == OUT_OF_MEMORY:
            return None, too_much_memory(self._memory)
        return None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._owner != os.getpid() or self._child.poll() is not None:
            self.close()
            limits = (str(self._seconds), str(self._memory))
            self._child = subprocess.Popen(
                command(__name__, *limits),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment(),
                start_new_session=True,  # a terminal's Ctrl-C is for this process
            )
            self._owner = os.getpid()
        return self._child


def too_much_memory(memory: int) -> str:
    """Return the error of a template that reached the memory limit."""
    return f"the chat template takes more than {memory >> 20} MiB of memory with this conversation: use another"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}")


_process = TemplateProcess()
atexit.register(_process.close)


def render_confined(template: str, messages: Sequence[Message], /, **options: Any) -> str:
    """Render in this process's one child; the arguments are those of `template.render`."""
    return _process.render(template, messages, **options)


def main() -> None:
    """Render for the parent process until it closes the pipe."""
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    confine(memory)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while (asked := read_frame(source)) is not None:
        answer: tuple[str | None, str]
        try:
            with deadline(seconds):
                template, messages, options = json.loads(asked)
                answer = render(template, messages, **options), ""
                packed = json.dumps(answer).encode()
        except ChairliftError as error:
            packed = json.dumps((None, str(error))).encode()
        except MemoryError:
            packed = json.dumps((None, too_much_memory(memory))).encode()
        write_frame(target, packed)


if __name__ == "__main__":
    main()
