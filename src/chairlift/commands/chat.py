"""`chairlift chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from chairlift.commands.command import in_flags
from chairlift.commands.options import GivenSampling, with_model, with_sampling, with_settings
from chairlift.commands.screen import Speed, notes, open_llm, write
from chairlift.core.errors import RequestError
from chairlift.core.params import SamplingParams
from chairlift.core.words import counted

if TYPE_CHECKING:
    from chairlift.offline.llm import LLM

HELP = """/reset  begin a new conversation
/quit   quit (or Ctrl-D)
/help   show this
Ctrl-C  stop the answer; twice at the prompt: quit"""


@with_settings
@with_sampling
@with_model()
def chat(
    context: typer.Context,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    *,
    model: str,
    sampling: GivenSampling,
    settings: dict[str, Any],
) -> None:
    """Talk to a model in the terminal."""
    llm = open_llm(model, settings, is_told=True)
    from chairlift.execution.build import choose_device

    conversation = Conversation(llm, system, sampling.on(llm.defaults))
    dtype = str(llm.config.dtype).removeprefix("torch.")
    notes.print(f"[bold]{model}[/] on {choose_device(llm.settings.model.device)} in {dtype}; /help for help")
    notes.print(f"weights: {llm.weights}", style="dim")
    notes.print(f"KV cache: {llm.capacity}", style="dim")
    for line in lines():
        match line.strip():
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/reset":
                conversation.reset()
                notes.print("a new conversation", style="dim")
            case "/help":
                notes.print(HELP, style="dim")
            case text if text.startswith("/") and " " not in text and "/" not in text[1:]:
                notes.print(f"there is no command {text}; /help lists all commands", markup=False)
            case text:
                try:
                    conversation.answer(text)
                except RequestError as error:
                    notes.print(f"error: {in_flags(str(error), context.command.params)}", markup=False)


class Conversation:
    """The messages so far, cut to fit the context."""

    def __init__(self, llm: LLM, system: str | None, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []
        length = llm.capacity.max_length
        # The rest is room for the answer: dropping an old turn is better than cutting a new answer.
        self._max_prompt = length - min(params.max_tokens or length, length // 4)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages.clear()

    def answer(self, text: str) -> None:
        """Stream the answer to a message; stopped or not, it becomes part of the conversation."""
        self._messages.append({"role": "user", "content": text})
        reply = ""
        speed = Speed()
        try:
            chunks = self._llm.stream(self._prompt(), self._params)
            with stoppable() as stopped, contextlib.closing(cast(Any, chunks)):
                for chunk in speed.watch(chunks):
                    reply += chunk.text
                    write(chunk.text)
                    if stopped():
                        break
        except RequestError:
            self._messages.pop()  # the conversation stays as it was before the rejected message
            raise
        write("\n")
        self._messages.append({"role": "assistant", "content": reply})
        notes.print(str(speed), style="dim")

    def _prompt(self) -> list[int]:
        """Return the conversation's token ids, after dropping the oldest turns until it fits."""
        dropped = 0
        while True:
            ids = self._llm.chat_prompt(self._opening + self._messages)
            turn = next((i for i, message in enumerate(self._messages) if i and message["role"] == "user"), 0)
            if len(ids) <= self._max_prompt or not turn:
                break
            del self._messages[:turn]
            dropped += 1
        if dropped:
            notes.print(f"the context is full: dropped the oldest {counted(dropped, 'turn')}", style="dim")
        return ids


def lines() -> Iterator[str]:
    """Yield the lines typed at the prompt, or the lines of a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):  # gives input() a history and arrow keys
        import readline  # noqa: F401
    was_interrupted = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if was_interrupted:
                return
            was_interrupted = True
            print("(press Ctrl-C again to quit)")
        else:
            was_interrupted = False
            yield line


@contextlib.contextmanager
def stoppable() -> Iterator[Any]:
    """Make Ctrl-C set a flag, which is read between steps, so that no step is interrupted."""
    pressed = False

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
