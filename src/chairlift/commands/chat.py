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
/quit   leave (or Ctrl-D)
/help   show this
Ctrl-C  stop the answer; twice at the prompt: leave"""


@with_settings
@with_sampling
@with_model()
def chat(
    context: typer.Context,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
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
                notes.print(f"there is no command {text}; /help shows those there are", markup=False)
            case text:
                try:
                    conversation.answer(text)
                except RequestError as error:
                    notes.print(f"error: {in_flags(str(error), context.command.params)}", markup=False)


class Conversation:
    """The messages so far, kept within what the model can see."""

    def __init__(self, llm: LLM, system: str | None, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []
        length = llm.capacity.max_length
        # Room kept for the answer: forgetting an old turn is better than a new answer cut after a word.
        self._longest = length - min(params.max_tokens or length, length // 4)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages.clear()

    def answer(self, text: str) -> None:
        """Stream the answer to a message; stopped or not, it becomes part of the conversation."""
        self._messages.append({"role": "user", "content": text})
        said = ""
        speed = Speed()
        try:
            chunks = self._llm.stream(self._prompt(), self._params)
            with stoppable() as stopped, contextlib.closing(cast(Any, chunks)):
                for chunk in speed.watch(chunks):
                    said += chunk.text
                    write(chunk.text)
                    if stopped():
                        break
        except RequestError:
            self._messages.pop()  # as if it had not been said
            raise
        write("\n")
        self._messages.append({"role": "assistant", "content": said})
        notes.print(str(speed), style="dim")

    def _prompt(self) -> list[int]:
        """The conversation in token ids; what no longer fits is dropped from its beginning, turn by turn."""
        dropped = 0
        while True:
            ids = self._llm.chat_prompt(self._opening + self._messages)
            turn = next((i for i, message in enumerate(self._messages) if i and message["role"] == "user"), 0)
            if len(ids) <= self._longest or not turn:
                break
            del self._messages[:turn]
            dropped += 1
        if dropped:
            notes.print(f"the context is full: dropped the oldest {counted(dropped, 'turn')}", style="dim")
        return ids


def lines() -> Iterator[str]:
    """What the user types, or the lines of a pipe."""
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
            print("(press Ctrl-C again to leave)")
        else:
            was_interrupted = False
            yield line


@contextlib.contextmanager
def stoppable() -> Iterator[Any]:
    """Turn Ctrl-C into a flag that is read between steps, so that the engine is never left in the middle of one."""
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
