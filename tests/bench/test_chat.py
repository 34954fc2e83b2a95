"""Chats with and without the prefix cache: real sessions on a tiny real model."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chairlift.bench.chat import Chat, ChatResult, Turn, agreement, chat_table, measure, summarize
from chairlift.core.errors import ChairliftError
from mostly_long import mostly_long
from tiny import make_tiny_model

BLOCK = 16
CHAT = Chat(sessions=6, turns=3, system_tokens=100, user_tokens=9, answer_tokens=7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("chat") / "llama", tokenizer=False))


def chatted(model: str, chat: Chat = CHAT, **settings: Any) -> dict[str, Any]:
    told: list[int] = []
    summary = measure(model, {"device": "cpu", **settings}, chat, advance=told.append)
    assert sum(told) == 2 * chat.output_tokens, "the progress bar reaches its end"
    return summary


def said(*answers: list[int]) -> ChatResult:
    """Return a result with a session of one turn for each answer."""
    return ChatResult([Turn(i, 0, [1], 0.0, 1.0, 0, tokens) for i, tokens in enumerate(answers)], seconds=1.0)


@pytest.mark.parametrize(
    "settings",
    mostly_long([{"overlap": True}, {}, {"max_sequences": 4}, {"batching": "static"}, {"policy": "longest-prefix"}]),
    ids=str,
)
def test_with_the_cache_little_more_than_new_tokens_is_computed(model: str, settings: dict[str, Any]) -> None:
    summary = chatted(model, **settings)
    cached, plain, least = summary["with"], summary["without"], summary["least_tokens"]
    assert least == 100 + 6 * (3 * 9 + 2)
    assert plain["cached_tokens"] == 0
    assert plain["computed_tokens"] == plain["prompt_tokens"] == 6 * (3 * 109 + (0 + 1 + 2) * (9 + 7))
    assert cached["computed_tokens"] == cached["prompt_tokens"] - cached["cached_tokens"]
    assert least <= cached["computed_tokens"] < least + 6 * 3 * BLOCK
    assert summary["same_tokens"] == 1
    assert cached["preemptions"] == plain["preemptions"] == 0


def test_tokens_recomputed_after_a_preemption_are_counted(model: str) -> None:
    chat = Chat(sessions=4, turns=1, system_tokens=100, user_tokens=9, answer_tokens=40)
    plain = chatted(model, chat, kv_tokens=23 * BLOCK)["without"]
    assert plain["preemptions"] > 0
    assert plain["computed_tokens"] > plain["prompt_tokens"]


def test_without_a_system_prompt_a_session_still_hits_its_own_history(model: str) -> None:
    summary = chatted(model, Chat(sessions=2, turns=4, system_tokens=0, user_tokens=20, answer_tokens=20))
    assert summary["with"]["cached_tokens"] > 0
    assert summary["same_tokens"] == 1


def test_all_numbers_can_be_written_and_shown(model: str) -> None:
    summary = json.loads(json.dumps(chatted(model)))
    assert len(summary["with"]["ttft_by_turn"]) == 3
    assert summary["ratio"]["computed_tokens"] < 0.3
    screen = StringIO()
    Console(file=screen, width=120).print(chat_table(summary))
    assert "turn 3, p95" in screen.getvalue()
    assert "both engines generated the same tokens" in screen.getvalue()


def test_answers_that_differ_are_reported() -> None:
    chat = Chat(sessions=2, turns=1, answer_tokens=4)
    one, other = said([1, 2, 3, 4], [5, 6, 7, 8]), said([1, 2, 3, 4], [5, 9, 7, 8])
    assert agreement(chat, one, one) == 1
    assert agreement(chat, one, other) == 5 / 8
    one.computed = other.computed = 1
    assert "62.50% of the tokens" in str(chat_table(summarize(chat, one, other) | {"model": "a model"}).caption)


def test_a_session_longer_than_the_context_is_refused(model: str) -> None:
    with pytest.raises(ChairliftError, match="has 1,300 tokens, and the context holds 512"):
        chatted(model, Chat())


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    from typer import Typer
    from typer.testing import CliRunner

    from chairlift.commands.bench_chat import bench_chat

    app = Typer()
    app.command()(bench_chat)
    for given, told in (
        (["--shape", "stories15m", "--model", "tiny"], "exclude each other"),
        (["--no-prefix-cache"], "leave out --no-prefix-cache"),
        (["--json", str(tmp_path / "nowhere" / "file")], "there is no such folder"),
    ):
        assert told in str(CliRunner().invoke(app, given).exception)
