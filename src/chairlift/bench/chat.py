"""Chat sessions with and without the prefix cache: the same sessions on two engines.

All sessions share a system prompt. Each sends its next question, after its whole history, as soon as the last answer
ends. So with every turn more of each prompt has been computed before.
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
from chairlift.cluster.tensor_parallel.build import assemble, load_model
from chairlift.core.errors import ChairliftError
from chairlift.core.params import SamplingParams
from chairlift.core.plan import Outcome, StepPlan
from chairlift.core.request import Request
from chairlift.core.settings import Settings
from chairlift.core.words import counted
from chairlift.engine.engine import Engine
from chairlift.execution.build import Loaded
from chairlift.report.numbers import common_length, percentile
from chairlift.report.tables import table

Summary = dict[str, Any]
WARM_ANSWER = 4
RATIOS = ("ttft_p50", "ttft_p95", "computed_tokens", "seconds", "output_tokens_per_second")


@dataclass(frozen=True, slots=True)
class Chat:
    """The number of sessions, turns and tokens."""

    sessions: int = 64
    turns: int = 5
    system_tokens: int = 1000
    user_tokens: int = 30
    answer_tokens: int = 30
    seed: int = 0

    @property
    def session_tokens(self) -> int:
        """Tokens of a session after its last answer."""
        return self.system_tokens + self.turns * (self.user_tokens + self.answer_tokens)

    @property
    def output_tokens(self) -> int:
        """Output tokens of all sessions."""
        return self.sessions * self.turns * self.answer_tokens

    @property
    def least_computed(self) -> int:
        """Prompt tokens that must be computed: the system prompt once, and the new tokens of each turn.

        They include the last token of the previous answer, which was sampled but never computed.

        >>> Chat(sessions=2, turns=3, system_tokens=100, user_tokens=10).least_computed
        164
        """
        return self.system_tokens + self.sessions * (self.turns * self.user_tokens + self.turns - 1)


@dataclass(slots=True, eq=False)
class Turn:
    """One question of a session, and its answer."""

    session: int
    number: int  # from 0
    prompt: list[int]
    sent_at: float
    first_token_at: float = 0.0
    cached_tokens: int = 0  # of the prompt
    answer: list[int] = field(default_factory=list)


@dataclass(slots=True)
class ChatResult:
    """The result of running all sessions."""

    turns: list[Turn]
    computed: int = 0  # prompt tokens
    seconds: float = 0.0
    preemptions: int = 0


class Sessions:
    """Runs a chat's sessions on an engine."""

    def __init__(
        self, engine: Engine, chat: Chat, vocab_size: int, advance: Callable[[int], None] = lambda _tokens: None
    ) -> None:
        self._engine = engine
        self._chat = chat
        self._advance = advance  # called with each step's number of output tokens
        draw = Random(chat.seed)
        self._system = [draw.randrange(vocab_size) for _ in range(chat.system_tokens)]
        self._questions = [
            [[draw.randrange(vocab_size) for _ in range(chat.user_tokens)] for _ in range(chat.turns)]
            for _ in range(chat.sessions)
        ]
        self._run = ChatResult([])

    def run(self) -> ChatResult:
        """Run all sessions to their end."""
        engine, run = self._engine, self._run
        before = engine.scheduler.counters.preemptions
        engine.on_step = self._count
        engine.end_input()  # so that static batching does not wait for more requests
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
        for sequence, token, reason, _logprobs, _prompt, error, _ in outcome:
            if error is not None or token is None:
                raise ChairliftError(
                    f"request {sequence.request.id} failed, so the chat cannot go on: {error or reason}"
                )
            turn = self._run.turns[int(sequence.request.id)]
            if not turn.answer:
                turn.first_token_at, turn.cached_tokens = now, sequence.cached
            turn.answer.append(token)
            if reason is not None and turn.number + 1 < self._chat.turns:
                self._ask(turn.session, turn.number + 1, turn.prompt + turn.answer, now)
        self._advance(len(outcome))

    def _count(self, plan: StepPlan, _began: float, _seconds: float) -> None:
        """Count prefill tokens; a preempted sequence recomputes its answer as part of its prompt."""
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
    """Run the chat with and then without the prefix cache, on the same weights, and return all numbers."""
    notice("loading")
    loaded = load_model(model, Settings.of(**settings), progress=False)
    room = settings.get("max_length") or loaded.config.max_length
    if chat.session_tokens > room:
        raise ChairliftError(
            f"a session has {counted(chat.session_tokens, 'token')}, and the context holds {room:,}: lower the turns "
            "or their tokens, or use a model with a longer context"
        )
    runs = {}
    for name, caches in (("with", True), ("without", False)):
        notice(f"{name} the prefix cache")
        chosen = Settings.of(**{**settings, "max_length": chat.session_tokens, "prefix_cache": caches})
        runs[name] = _drive(loaded, chosen, chat, advance)
    return summarize(chat, runs["with"], runs["without"]) | {
        "model": model,
        "device": str(loaded.device),
        "dtype": str(loaded.config.dtype).removeprefix("torch."),
    }


def _drive(loaded: Loaded, settings: Settings, chat: Chat, advance: Callable[[int], None]) -> ChatResult:
    """Run the chat on a new engine, and free its KV memory afterwards."""
    built = assemble(loaded, settings, progress=False)
    vocab_size = loaded.config.vocab_size
    # A warm-up session, not timed, to compile kernels; then the cache is emptied.
    alone = Chat(1, 1, chat.system_tokens, chat.user_tokens, min(WARM_ANSWER, chat.answer_tokens), chat.seed + 1)
    Sessions(built.engine, alone, vocab_size).run()
    built.engine.clear_prefix_cache()
    try:
        return Sessions(built.engine, chat, vocab_size, advance).run()
    finally:
        del built
        gc.collect()


# ---- results


def summarize(chat: Chat, cached: ChatResult, plain: ChatResult) -> Summary:
    """Return all numbers; times are seconds, and a ratio is with the cache / without."""
    found = {"with": _numbers(chat, cached), "without": _numbers(chat, plain)}
    return {
        "chairlift": __version__,
        "chat": asdict(chat),
        "least_tokens": chat.least_computed,
        **found,
        "ratio": {name: found["with"][name] / found["without"][name] for name in RATIOS},
        "same_tokens": agreement(chat, cached, plain),
    }


def _numbers(chat: Chat, run: ChatResult) -> Summary:
    by_turn = [
        [turn.first_token_at - turn.sent_at for turn in run.turns if turn.number == number]
        for number in range(chat.turns)
    ]
    times = [time for each in by_turn for time in each]
    return {
        "ttft_p50": median(times),
        "ttft_p95": percentile(times, 95),
        "ttft_by_turn": [{"p50": median(each), "p95": percentile(each, 95)} for each in by_turn],
        "prompt_tokens": sum(len(turn.prompt) for turn in run.turns),
        "cached_tokens": sum(turn.cached_tokens for turn in run.turns),
        "computed_tokens": run.computed,
        "seconds": run.seconds,
        "output_tokens_per_second": chat.output_tokens / run.seconds,
        "preemptions": run.preemptions,
    }


def agreement(chat: Chat, one: ChatResult, other: ChatResult) -> float:
    """Return the share of tokens before a session's answers first differ; after that the conversations differ."""
    same = 0
    for session in range(chat.sessions):
        first, second = (
            [token for turn in run.turns if turn.session == session for token in turn.answer] for run in (one, other)
        )
        same += common_length(first, second)
    return same / chat.output_tokens


def chat_table(summary: Summary) -> Table:
    """Return the table: with the cache, without, and the ratio."""
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
        _agreement_note(summary["same_tokens"]),
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"


def _agreement_note(same: float) -> str:
    """Return the note on whether both engines generated the same tokens."""
    if same == 1:
        return "both engines generated the same tokens"
    return f"{same:.2%} of the tokens come before answers first differ: sums in another order round differently"
