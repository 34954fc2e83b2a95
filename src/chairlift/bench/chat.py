"""What the prefix cache is worth to chats: the same sessions through an engine that has one and one that has not.

All sessions share a system prompt. Each asks its next question, behind all that was said before, as soon as it has its
last answer. So the longer they talk, the more of every prompt has been computed before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from random import Random
from statistics import median
from typing import Any

from rich.table import Table

from chairlift import __version__
from chairlift.core.errors import ChairliftError
from chairlift.core.params import SamplingParams
from chairlift.core.plan import Outcome, StepPlan
from chairlift.core.request import Request
from chairlift.core.settings import Settings
from chairlift.core.words import counted
from chairlift.engine.engine import Engine
from chairlift.execution.build import Loaded, assemble, load_model
from chairlift.report.numbers import common_length, percentile
from chairlift.report.tables import table

Summary = dict[str, Any]
WARM_ANSWER = 4
RATIOS = ("ttft_p50", "ttft_p95", "computed_tokens", "seconds", "output_tokens_per_second")


@dataclass(frozen=True, slots=True)
class Chat:
    """How many talk, for how long, and in how many tokens."""

    sessions: int = 64
    turns: int = 5
    system_tokens: int = 1000
    user_tokens: int = 30
    answer_tokens: int = 30
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of a session at its end."""
        return self.system_tokens + self.turns * (self.user_tokens + self.answer_tokens)

    @property
    def answered(self) -> int:
        """Tokens that are written, in all sessions."""
        return self.sessions * self.turns * self.answer_tokens

    @property
    def least(self) -> int:
        """Prompt tokens that must be computed: the system prompt once, and in each turn what is new.

        The last token of an answer is new, too: nothing came after it, so it was never computed.

        >>> Chat(sessions=2, turns=3, system_tokens=100, user_tokens=10).least
        164
        """
        return self.system_tokens + self.sessions * (self.turns * self.user_tokens + self.turns - 1)


@dataclass(slots=True, eq=False)
class Turn:
    """One question of a session, and its answer."""

    session: int
    number: int  # from 0
    prompt: list[int]
    asked: float
    first: float = 0.0
    cached: int = 0  # tokens of the prompt
    answer: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """All sessions, to their end."""

    turns: list[Turn]
    computed: int = 0  # prompt tokens
    seconds: float = 0.0
    preemptions: int = 0


class Sessions:
    """Plays a chat's users on an engine."""

    def __init__(
        self, engine: Engine, chat: Chat, vocab_size: int, advance: Callable[[int], None] = lambda _tokens: None
    ) -> None:
        self._engine = engine
        self._chat = chat
        self._advance = advance  # told of every step's answer tokens
        draw = Random(chat.seed)
        self._system = [draw.randrange(vocab_size) for _ in range(chat.system_tokens)]
        self._questions = [
            [[draw.randrange(vocab_size) for _ in range(chat.user_tokens)] for _ in range(chat.turns)]
            for _ in range(chat.sessions)
        ]
        self._run = Run([])

    def run(self) -> Run:
        """Everything, to the end."""
        engine, run = self._engine, self._run
        before = engine.scheduler.counters.preemptions
        engine.on_step = self._count
        engine.end_input()  # a static batch need not wait for more than these
        start = engine.clock.now()
        for session in range(self._chat.sessions):
            self._ask(session, 0, self._system, start)
        while engine.has_work:
            self._read(engine.step())
        run.seconds = engine.clock.now() - start
        engine.on_step = None
        run.preemptions = engine.scheduler.counters.preemptions - before
        return run

    def _ask(self, session: int, number: int, history: list[int], now: float) -> None:
        turn = Turn(session, number, history + self._questions[session][number], now)
        params = SamplingParams(temperature=0, max_tokens=self._chat.answer_tokens, ignore_eos=True)
        self._engine.submit(Request(str(len(self._run.turns)), turn.prompt, params, arrival=now))
        self._run.turns.append(turn)

    def _read(self, outcome: Outcome) -> None:
        now = self._engine.clock.now()
        for sequence, token, reason, _logprobs, _prompt, error in outcome:
            if error is not None or token is None:
                raise ChairliftError(f"request {sequence.request.id} failed, and with it the chat: {error or reason}")
            turn = self._run.turns[int(sequence.request.id)]
            if not turn.answer:
                turn.first, turn.cached = now, sequence.cached
            turn.answer.append(token)
            if reason is not None and turn.number + 1 < self._chat.turns:
                self._ask(turn.session, turn.number + 1, turn.prompt + turn.answer, now)
        self._advance(len(outcome))

    def _count(self, plan: StepPlan, _began: float, _seconds: float) -> None:
        """Add up what is not a decode; one that was preempted computes its answer again, as a part of its prompt."""
        for sequence, start, count in plan.slices:
            if count > 1 or start < sequence.prompt_length:
                self._run.computed += count


def measure(
    model: str,
    settings: dict[str, Any],
    chat: Chat,
    notice: Callable[[str], None] = lambda _text: None,
    advance: Callable[[int], None] = lambda _tokens: None,
) -> Summary:
    """The chat with the prefix cache and then without, on the same weights, and all numbers of both."""
    notice("loading")
    loaded = load_model(model, Settings.of(**settings), progress=False)
    room = settings.get("max_length") or loaded.config.max_length
    if chat.longest > room:
        raise ChairliftError(
            f"a session becomes {counted(chat.longest, 'token')} long, and the context holds {room:,}: lower the turns "
            "or their tokens, or use a model with a longer context"
        )
    runs = {}
    for name, caches in (("with", True), ("without", False)):
        notice(f"{name} the prefix cache")
        chosen = Settings.of(**{**settings, "max_length": chat.longest, "prefix_cache": caches})
        runs[name] = _drive(loaded, chosen, chat, advance)
    return summarize(chat, runs["with"], runs["without"]) | {
        "model": model,
        "device": str(loaded.device),
        "dtype": str(loaded.config.dtype).removeprefix("torch."),
    }


def _drive(loaded: Loaded, settings: Settings, chat: Chat, advance: Callable[[int], None]) -> Run:
    """One run on an engine of its own; it is gone afterwards, and its KV memory free."""
    built = assemble(loaded, settings, progress=False)
    vocab_size = loaded.config.vocab_size
    # A session that nobody times: kernels are compiled, and then the cache is as empty as before.
    alone = Chat(1, 1, chat.system_tokens, chat.user_tokens, min(WARM_ANSWER, chat.answer_tokens), chat.seed + 1)
    Sessions(built.engine, alone, vocab_size).run()
    built.engine.clear_prefix_cache()
    try:
        return Sessions(built.engine, chat, vocab_size, advance).run()
    finally:
        del built
        gc.collect()


# ---- what was found


def summarize(chat: Chat, cached: Run, plain: Run) -> Summary:
    """All numbers; times are seconds, and a ratio is what there is with the cache over what there is without."""
    found = {"with": _numbers(chat, cached), "without": _numbers(chat, plain)}
    return {
        "chairlift": __version__,
        "chat": asdict(chat),
        "least_tokens": chat.least,
        **found,
        "ratio": {name: found["with"][name] / found["without"][name] for name in RATIOS},
        "same_tokens": agreement(chat, cached, plain),
    }


def _numbers(chat: Chat, run: Run) -> Summary:
    by_turn = [[turn.first - turn.asked for turn in run.turns if turn.number == number] for number in range(chat.turns)]
    times = [time for each in by_turn for time in each]
    return {
        "ttft_p50": median(times),
        "ttft_p95": percentile(times, 95),
        "ttft_by_turn": [{"p50": median(each), "p95": percentile(each, 95)} for each in by_turn],
        "prompt_tokens": sum(len(turn.prompt) for turn in run.turns),
        "cached_tokens": sum(turn.cached for turn in run.turns),
        "computed_tokens": run.computed,
        "seconds": run.seconds,
        "output_tokens_per_second": chat.answered / run.seconds,
        "preemptions": run.preemptions,
    }


def agreement(chat: Chat, one: Run, other: Run) -> float:
    """The share of tokens before a session's answers part; from there on it is another conversation."""
    same = 0
    for session in range(chat.sessions):
        first, second = (
            [token for turn in run.turns if turn.session == session for token in turn.answer] for run in (one, other)
        )
        same += common_length(first, second)
    return same / chat.answered


def chat_table(summary: Summary) -> Table:
    """With the cache, without, and the ratio."""
    chat, cached, plain, least = summary["chat"], summary["with"], summary["without"], summary["least_tokens"]

    def row(label: str, name: str, write: Callable[[float], str], turn: int | None = None) -> tuple[str, ...]:
        a, b = (each[name] if turn is None else each["ttft_by_turn"][turn][name] for each in (cached, plain))
        return label, write(a), write(b), f"{a / b:.3g}x"

    shares = (f"{each['computed_tokens'] / least:.2f}x" for each in (cached, plain))
    return table(
        f"{summary['model']}: {counted(chat['sessions'], 'session')} of {counted(chat['turns'], 'turn')},\n"
        f"{counted(chat['system_tokens'], 'token')} of system prompt, {chat['user_tokens']:,} of a question, "
        f"{chat['answer_tokens']:,} of an answer",
        ("", "with the cache", "without", "ratio"),
        [
            *(row(f"first token, {mark}", f"ttft_{mark}", _milliseconds) for mark in ("p50", "p95")),
            *(
                row(f"  turn {turn + 1}, {mark}", mark, _milliseconds, turn)
                for turn in range(chat["turns"])
                for mark in ("p50", "p95")
            ),
            row("prompt tokens computed", "computed_tokens", lambda tokens: f"{tokens:,}"),
            (f"  of the {least:,} that are new", *shares),
            row("seconds", "seconds", lambda seconds: f"{seconds:,.1f}"),
            row("output tok/s", "output_tokens_per_second", lambda speed: f"{speed:,.1f}"),
        ],
        _said(summary["same_tokens"]),
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"


def _said(same: float) -> str:
    """Whether both said the same."""
    if same == 1:
        return "both engines wrote the same tokens"
    return f"the same tokens up to {same:.2%}: sums in another order round otherwise, and from there answers part"
