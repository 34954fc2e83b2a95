"""Batch files under attack: an error stays with its line, no file is cut but our own, and a full disk is one error."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.errors import ChairliftError
from chairlift.offline.batch import CHAT, COMPLETIONS, Tally, run_batch
from spoil import spoil_bytes, spoil_value


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), progress=False, max_length=96)


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> bytes:
    body = body or {"prompt": f"chair {custom_id}", "max_tokens": 4, "temperature": 0}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def chat(custom_id: str, **body: Any) -> bytes:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    return line(custom_id, CHAT, **{"messages": said, "max_tokens": 4, "temperature": 0, **body})


def write(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"".join(each + b"\n" for each in lines))
    return path


def refuse_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def read(path: Path) -> list[dict[str, Any]]:
    """The records: whole lines of strict JSON."""
    content = path.read_text()
    assert not content or content.endswith("\n")
    return [json.loads(each, parse_constant=refuse_constant) for each in content.splitlines()]


def answered(path: Path) -> dict[str, str]:
    """The texts of the answers by custom_id."""
    found = [each for each in read(path) if each["error"] is None]
    assert all(each["response"]["status_code"] == 200 for each in found)
    texts = {}
    for each in found:
        (choice, *_) = each["response"]["body"]["choices"]
        texts[each["custom_id"]] = choice["text"] if "text" in choice else choice["message"]["content"]
    assert len(texts) == len(found), "a custom_id has one answer"
    return texts


FULL_BODY = {
    "n": 1,
    "best_of": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["zz"],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "max_tokens": 4,
    "stop_token_ids": [7],
    "allowed_token_ids": [5, 6, 8],
    "bad_words": ["no"],
    "logit_bias": {"5": 1.0},
    "ignore_eos": True,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "user": "me",
    "truncate_prompt_tokens": 8,
    "length_penalty": 1.0,
    "early_stopping": False,
    "use_beam_search": False,
}
TEMPLATE_ARGUMENTS = ("messages", "template", "bos_token", "eos_token", "tools", "kwargs", "self", "context", "loop")


def odd_line(rng: random.Random, custom_id: str) -> bytes:
    """A line that may be wrong in any way: in its bytes, its shape, its body or what it tells the chat template."""
    if rng.random() < 0.5:
        body = {**FULL_BODY, "prompt": rng.choice(("chair", ["a", "b"], [5, 6, 7])), "logprobs": 2, "echo": True}
        sound = line(custom_id, **body)
    else:
        variables = {rng.choice(TEMPLATE_ARGUMENTS): "x", "enable_thinking": False}
        options = {"chat_template_kwargs": variables, "logprobs": True, "top_logprobs": 2} if rng.random() < 0.5 else {}
        sound = chat(custom_id, **{**FULL_BODY, **options})
    kind = rng.randrange(10)
    if kind == 0:
        return spoil_bytes(rng, sound).replace(b"\n", b" ").replace(b"\r", b" ")
    if kind == 1:
        return json.dumps(spoil_value(rng, json.loads(sound))).encode()
    read: dict[str, Any] = json.loads(sound)
    for _ in range(rng.randint(0, 2)):
        read["body"] = spoil_value(rng, read["body"])
    return json.dumps(read).encode()


def run_odd_lines(llm: LLM, folder: Path, count: int) -> Counter[str]:
    """Run a file in which every tenth line is sound, twice; what became of the lines."""
    rng = random.Random(count)
    lines = [odd_line(rng, f"odd{i}") if i % 10 else line(f"sound{i}") for i in range(count)]
    source, out = write(folder / "in.jsonl", lines), folder / "out.jsonl"
    there = [each for each in lines if each.strip()]
    first = run_batch(llm, source, out)
    assert first.done + first.failed == len(there) == len(read(out)), "each line has one record"
    texts = answered(out)
    alone = {}
    for i in range(0, count, 10):
        alone[f"sound{i}"] = llm.generate(f"chair sound{i}", GREEDY)[0].outputs[0].text
    assert {name: texts.get(name) for name in alone} == alone, "sound lines have the answers they have alone"
    again = run_batch(llm, source, out)
    assert (again.done, again.skipped, again.failed) == (0, first.done, first.failed), "only failed lines run again"
    assert answered(out) == texts and len(read(out)) == len(there)
    codes = [each["error"]["code"] for each in read(out) if each["error"]]
    return Counter({"answered": first.done, **Counter(codes)})


GREEDY = SamplingParams(temperature=0, max_tokens=4)


def test_odd_lines_have_their_own_errors_and_sound_ones_their_answers(llm: LLM, tmp_path: Path) -> None:
    found = run_odd_lines(llm, tmp_path, 300)
    assert found["answered"] > 60 and found["invalid_request"] > 60
    assert not found["server_error"], "whatever a line holds is told as its own fault"


@pytest.mark.long
def test_thousands_of_odd_lines_have_their_own_errors(llm: LLM, tmp_path: Path) -> None:
    assert not run_odd_lines(llm, tmp_path, 5000)["server_error"]


@pytest.mark.parametrize("name", ["read_chat", "_submit"])
def test_a_fault_of_ours_stays_with_its_line(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sound = getattr(llm, name)

    def faulty(*args: Any, **options: Any) -> Any:
        if "poison" in str(args):
            raise ZeroDivisionError("a bug\nof ours")
        return sound(*args, **options)

    monkeypatch.setattr(llm, name, faulty)
    poison = (
        chat("b", messages=[{"role": "user", "content": "poison"}])
        if name == "read_chat"
        else line("b", prompt="poison")
    )
    out = tmp_path / "out.jsonl"
    tally = run_batch(llm, write(tmp_path / "in.jsonl", [line("a"), poison, chat("c")]), out)
    assert (tally.done, tally.failed) == (2, 1)
    assert set(answered(out)) == {"a", "c"}
    (failure,) = tally.failures
    assert (failure.line, failure.custom_id) == (2, "b")
    assert "cannot be read: ZeroDivisionError: a bug of ours" in failure.reason


def a_record(llm: LLM, folder: Path) -> bytes:
    """One line that a job has written."""
    run_batch(llm, write(folder / "one.jsonl", [line("one")]), folder / "record.jsonl")
    return (folder / "record.jsonl").read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"{",
            b'{"id',
            b'{"id": "batch_req',
            b'{"id": "batch_req-',
            b'{"id": "batch_req_681f',
            b"\0\0\0",
            b" ",
            b"my notes",
        ),
        *(b'{"id": "batch_req-' + b"g" * 32 + b'", "custom_id": "a"', b'{"custom_id": "a"', b"[1, 2]", b"{}", b"\xff"),
        b'{"id": "batch_req_681fb0a6a9c08190b9a3ee4ae5f4dfa8", "custom_id": "a", "resp',  # a torn download of OpenAI's
    ],
)
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_file_that_no_job_has_written_is_never_changed(llm: LLM, tmp_path: Path, text: bytes, end: bytes) -> None:
    source, out = write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "notes"
    out.write_bytes(text + end)
    with pytest.raises(ChairliftError, match=r"line 1, is no batch result.*Nothing was changed"):
        run_batch(llm, source, out)
    assert out.read_bytes() == text + end


def test_a_last_line_of_others_is_not_cut_even_after_lines_of_ours(llm: LLM, tmp_path: Path) -> None:
    ours = a_record(llm, tmp_path)
    source, out = write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl"
    for text in (b"[", b'{"custom_id": "a"', b'{"id": "batch_req_68', b'{"id": "batch_req-xyz'):
        out.write_bytes(ours + text)
        with pytest.raises(ChairliftError, match="line 2, is no batch result"):
            run_batch(llm, source, out)
        assert out.read_bytes() == ours + text


def test_a_line_of_ours_torn_at_any_byte_is_cut_off(llm: LLM, tmp_path: Path) -> None:
    ours = a_record(llm, tmp_path)
    source, out = write(tmp_path / "in.jsonl", [line("one")]), tmp_path / "out.jsonl"
    other = ours.replace(b'"one"', b'"two"')
    for length in (*range(1, 80, 7), len(ours) // 2, len(ours) - 2):
        out.write_bytes(other + ours[:length])
        assert run_batch(llm, source, out).done == 1
        assert out.read_bytes().startswith(other) and set(answered(out)) == {"one", "two"}


ODD_RECORDS = [
    {"custom_id": ["a"], "response": None, "error": None},
    {"custom_id": {"a": 1}, "response": None, "error": {"code": "c", "message": "m"}},
    {"custom_id": 5, "response": None, "error": None},
    {"custom_id": "a", "response": [], "error": None},
    {"custom_id": "a", "response": "200", "error": None},
    {"custom_id": "a", "response": None},
    {"response": None, "error": None},
    [],
    None,
    "a",
]


@pytest.mark.parametrize("record", ODD_RECORDS, ids=json.dumps)
def test_odd_records_are_told_with_their_line(llm: LLM, tmp_path: Path, record: object) -> None:
    ours = a_record(llm, tmp_path)
    source, out = write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl"
    out.write_bytes(ours + json.dumps(record).encode() + b"\n" + ours)
    before = out.read_bytes()
    with pytest.raises(ChairliftError, match="line 2, is no batch result"):
        run_batch(llm, source, out)
    assert out.read_bytes() == before


def test_records_deeper_than_the_stack_are_told_with_their_line(llm: LLM, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl"
    out.write_bytes(b'{"custom_id": ' + b"[" * 100_000 + b"\n")
    with pytest.raises(ChairliftError, match="line 1, is no batch result"):
        run_batch(llm, source, out)


def test_odd_errors_in_records_are_tried_again(llm: LLM, tmp_path: Path) -> None:
    odd = [0, "", False, [], {"code": None}]
    records = [{"id": "x", "custom_id": f"r{i}", "response": None, "error": each} for i, each in enumerate(odd)]
    out = write(tmp_path / "out.jsonl", [json.dumps(each).encode() for each in records])
    source = write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(len(odd))])
    assert run_batch(llm, source, out) == Tally(done=5, tokens=20)
    assert len(read(out)) == 5


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process may grow past so many bytes: to a writer, a disk that is full then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_error_and_the_job_goes_on_when_there_is_room(llm: LLM, tmp_path: Path) -> None:
    ids = [f"r{i}" for i in range(12)]
    source, out = write(tmp_path / "in.jsonl", [line(each) for each in ids]), tmp_path / "out.jsonl"
    whole = tmp_path / "whole.jsonl"
    run_batch(llm, source, whole)
    for size in (0, 1, 700, 1500, 1501, 3000):
        with full_disk(size), pytest.raises(ChairliftError, match=r"cannot be written.*run this again") as caught:
            run_batch(llm, source, out)
        assert "\n" not in str(caught.value)
        assert len(read(out)) == out.read_bytes().count(b"\n"), "it holds whole lines alone"
    done = len(read(out))
    assert 0 < done < len(ids)
    tally = run_batch(llm, source, out)
    assert (tally.done, tally.skipped) == (len(ids) - done, done)
    assert answered(out) == answered(whole)


def test_a_full_disk_keeps_failed_lines_that_cannot_be_rewritten(llm: LLM, tmp_path: Path) -> None:
    lines = [line("a"), line("b", prompt="x", temperature=-1), line("c")]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    run_batch(llm, source, out)
    before = out.read_bytes()
    with full_disk(100), pytest.raises(ChairliftError, match="cannot be rewritten"):
        run_batch(llm, source, out)
    assert out.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}, "nothing temporary stays"


@pytest.mark.long
def test_the_command_ends_with_one_line_on_a_full_disk(llm: LLM, tiny_model: Path, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(20)]), tmp_path / "out.jsonl"
    limit = 4000
    failed = subprocess.run(
        [sys.executable, "-m", "chairlift", "batch", str(source), str(out), "--model", str(tiny_model)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.startswith(f"error: {out} cannot be written (File too large)")
    assert failed.stderr.count("\n") == 1
    kept = len(read(out))
    assert 0 < kept < 20
    tally = run_batch(llm, source, out)
    assert (tally.done, tally.failed, tally.skipped) == (20 - kept, 0, kept)


def test_an_input_that_can_be_read_only_once_is_refused(llm: LLM, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ChairliftError, match="no regular file, and a job reads its input more than once"):
        run_batch(llm, pipe, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
