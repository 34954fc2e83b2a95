"""Recorded traffic: what a server was asked, without content, in a file that the simulator reads."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path

import pytest
from running import keys_file, running
from typer.testing import CliRunner

from chairlift.cli import app
from chairlift.core.errors import ChairliftError
from chairlift.serving.recording import BLOCK_TOKENS, Recording, Served, prepare
from chairlift.traffic.traces import read_trace

KEY = bytes(range(16))
PREFIX = list(range(2 * BLOCK_TOKENS))


def served(prompt: list[int], *, arrival: float = 0.0, outputs: tuple[int, ...] = (5,), salt: str = "") -> Served:
    return Served(arrival, prompt, list(outputs), "alice", "chat", 0, salt)


def recorded(path: Path, *requests: Served, key: bytes = KEY) -> None:
    recording = Recording(path, key)
    for request in requests:
        recording.add(request)
    recording.close()


@pytest.mark.long
def test_a_server_records_its_requests_for_the_simulator_and_never_their_content(
    tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "traffic.jsonl"
    flags = ("--kv-tokens", "4096", "--record", str(file), "--api-keys", keys_file(tmp_path, acme=""))
    prompt = [7] * (BLOCK_TOKENS + 10)
    with running(tiny_model, *flags) as server:
        server.key = "sk-key-of-acme"
        for length, n in ((3, 1), (4, 2)):
            body = {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "n": n, "temperature": 1}
            assert server.post("/v1/completions", body).status_code == 200
        stream = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True, "stream": True}
        assert server.post("/v1/completions", stream).status_code == 200
        assert server.post("/v1/completions", {"prompt": "", "max_tokens": -1}).status_code == 400  # not recorded
    found = read_trace(file)
    assert [query.output_tokens for query in found] == [3, 4, 4, 5]
    assert {query.prompt_tokens for query in found} == {len(prompt)}
    assert len({tuple(query.blocks) for query in found}) == 1 == len(found[0].blocks)
    assert {query.endpoint for query in found} == {"completions"}
    assert "acme" not in file.read_text() and len({query.tenant for query in found}) == 1
    assert file.stat().st_mode & 0o077 == 0
    result = CliRunner().invoke(app, ["simulate", str(file)])
    assert result.exit_code == 0 and "4 finished" in result.output


def test_common_prefixes_have_common_hashes_within_a_salt_and_a_key(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    requests = [served(PREFIX + [1] * 80), served(PREFIX + [2] * 80), served(PREFIX + [1] * 80, salt="alice/")]
    recorded(file, *requests)
    one, other, salted = (query.blocks for query in read_trace(file))
    assert len(one) == 3 and one[:2] == other[:2] and one[2] != other[2]
    assert not set(one) & set(salted)
    again = tmp_path / "b.jsonl"
    recorded(again, *requests, key=bytes(16))
    assert not set(one) & set(read_trace(again)[0].blocks)


def test_a_full_disk_is_one_line_of_the_log_and_no_exception(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "chairlift"):
        recorded(Path("/dev/full"), *[served(PREFIX)] * 5)
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full cannot be written: No space left on device; no more requests are recorded in it"
    ]


def test_a_disk_that_takes_half_a_line_keeps_the_lines_before_it(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    recorded(file, *[served(PREFIX)] * 2000)
    whole = file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 40, hard))
    try:
        recorded(file, *[served(PREFIX)] * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == whole
    recorded(file, served(PREFIX))
    assert len(read_trace(file)) == 2001


def test_more_requests_than_can_be_written_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("chairlift.serving.recording._MOST_TOKENS", 3 * len(PREFIX))
    monkeypatch.setattr(Recording, "_run", lambda self: None)  # the thread writes nothing
    recording = Recording(tmp_path / "traffic.jsonl", KEY)
    for _ in range(10):
        recording.add(served(PREFIX))
    recording.close()
    assert "7 requests are not in" in caplog.text


def test_a_file_is_continued_if_it_is_a_recording_and_refused_if_not(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    recorded(file, served(PREFIX), served(PREFIX))
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"timestamp":12.5,"prompt_tok')  # the server was killed
    prepare(file)
    assert file.read_bytes() == whole
    other = tmp_path / "notes.txt"
    other.write_text("not a line of ours")
    for path, why in ((other, "other content"), (tmp_path / "no" / "folder", "No such file"), (tmp_path, "directory")):
        with pytest.raises(ChairliftError, match=why):
            prepare(path)
    assert other.read_text() == "not a line of ours"
    result = CliRunner().invoke(app, ["serve", "--record", str(other)])
    assert isinstance(result.exception, ChairliftError) and "name another file" in str(result.exception)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("block_tokens", 0, "block_tokens is 0"),
        ("block_tokens", 4000, "more than its prompt"),
        ("tenant", 3, "its tenant is 3"),
        ("priority", "high", "its priority is 'high'"),
        ("hash_ids", ["x"], 'its hash_ids hold "x"'),
        ("output_tokens", -3, "output_tokens is -3"),
    ],
)
def test_a_malformed_line_is_named_by_its_file_and_number(tmp_path: Path, field: str, value: object, why: str) -> None:
    file = tmp_path / "traffic.jsonl"
    recorded(file, served(PREFIX), served(PREFIX))
    first, second = map(json.loads, file.read_text().splitlines())
    file.write_text(json.dumps(first) + "\n\n" + json.dumps(second | {field: value}) + "\n")
    with pytest.raises(ChairliftError, match=r"traffic\.jsonl, line 3, is not a valid arrival") as error:
        read_trace(file)
    assert why in str(error.value)
