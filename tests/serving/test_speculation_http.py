"""Speculation as clients and operators see it: predictions, usage, metrics and explanations, on a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Running, running

from chairlift.core.drafting import MAX_DRAFTS
from chairlift.core.params import SamplingParams
from chairlift.core.plan import Event
from chairlift.core.request import Request, Sequence
from chairlift.serving.core_messages import as_update
from chairlift.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def drafting(tiny_model: Path) -> Iterator[Running]:
    with running(tiny_model, "--kv-tokens", "8192", "--speculation", "ngram") as started:
        yield started
        started.wait_until(started.is_idle)


@pytest.fixture(scope="module")
def letters(tiny_model: Path) -> list[int]:
    """Tokens of one letter that no other token begins with: a text of them has one spelling."""
    tokenizer = Tokenizer.from_folder(tiny_model)
    return [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "QXZJKVWYPB"]


def ask(server: Running, letters: list[int], **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Say it"}], "temperature": 0, "max_tokens": 64, "ignore_eos": True}
    reply = server.post(CHAT, {**body, "allowed_token_ids": letters, **more})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.long
def test_a_prediction_is_drafted_and_counted_and_changes_no_answer(drafting: Running, letters: list[int]) -> None:
    plain = ask(drafting, letters, cache_salt="one", n=1)
    text = plain["choices"][0]["message"]["content"]
    before = drafting.metric("spec_decode_num_drafts_total")
    for number, form in enumerate((text, [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:]}])):
        predicted = {"type": "content", "content": form}
        # A salt of its own: the answer before is not found by any other.
        found = ask(drafting, letters, cache_salt=f"other {number}", prediction=predicted)
        assert found["choices"][0]["message"]["content"] == text
        details = found["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 20, "almost all of it"
        assert details["rejected_prediction_tokens"] <= 3 * MAX_DRAFTS
        assert found["usage"]["completion_tokens"] == 64
    drafting.wait_until(lambda: drafting.metric("spec_decode_num_drafts_total") > before)
    accepted = [
        drafting.metric("spec_decode_num_accepted_tokens_per_pos_total", position=str(place + 1)) for place in range(8)
    ]
    drafted = [
        drafting.metric("spec_decode_num_draft_tokens_per_pos_total", position=str(place + 1)) for place in range(8)
    ]
    assert drafted == sorted(drafted, reverse=True) and accepted == sorted(accepted, reverse=True)
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True)) and accepted[0] > 0


@pytest.mark.long
def test_a_streamed_answer_with_several_tokens_a_step_is_the_same_text(drafting: Running, letters: list[int]) -> None:
    whole = ask(drafting, letters, cache_salt="streamed")
    again = {"type": "content", "content": whole["choices"][0]["message"]["content"]}
    stream = {"stream": True, "stream_options": {"include_usage": True}, "prediction": again, "cache_salt": "x"}
    body = {"messages": [{"role": "user", "content": "Say it"}], "temperature": 0, "max_tokens": 64, "ignore_eos": True}
    reply = drafting.post(CHAT, {**body, "allowed_token_ids": letters, **stream})
    assert reply.status_code == 200
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    text = "".join(
        choice["delta"].get("content") or "" for chunk in chunks if "choices" in chunk for choice in chunk["choices"]
    )
    assert text == whole["choices"][0]["message"]["content"]
    used = chunks[-1]["usage"]
    assert used["completion_tokens"] == 64
    assert used["completion_tokens_details"]["accepted_prediction_tokens"] > 20


@pytest.mark.parametrize(
    "wrong",
    ["text", {"type": "content"}, {"type": "other", "content": "a"}, {"type": "content", "content": [{"a": 1}]}],
)
def test_a_prediction_that_cannot_be_read_is_refused(server: Running, wrong: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Say it"}], "max_tokens": 1, "prediction": wrong}
    reply = server.post(CHAT, body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("prediction is ")


def test_the_admission_of_an_answer_is_told_however_many_tokens_its_first_step_brings() -> None:
    """A prompt of which all but the last token is cached begins with a check: its first update has more than one."""
    sequence = Sequence(Request("0.1.r", [1, 2, 3], SamplingParams()), 0, 100)
    sequence.started, sequence.cached = 5.0, 2
    sequence.tokens += [4] * (1 + MAX_DRAFTS)
    first = as_update(1, Event(sequence, 4))
    assert (first.started, first.cached) == (5.0, 2)
    sequence.tokens.append(4)
    assert as_update(1, Event(sequence, 4)).started is None


def test_serve_refuses_to_accept_drafts_by_chance(tiny_model: Path) -> None:
    flags = ["serve", str(tiny_model), "--speculation", "ngram", "--acceptance", "0.75"]
    found = subprocess.run([sys.executable, "-m", "chairlift", *flags], capture_output=True, text=True, timeout=60)
    assert found.returncode != 0 and "--acceptance" in found.stderr
