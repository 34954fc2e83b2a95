"""Batch files: every request gets one line, whatever is in the file and whenever the job was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.errors import ChairliftError, RequestError
from chairlift.offline.batch import CHAT, COMPLETIONS, Tally, run_batch
from chairlift.offline.llm import Prompt
from chairlift.text.outputs import RequestOutput


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), progress=False)


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    """A batch line; without a body, a short completion."""
    body = body or {"prompt": f"chair {custom_id}", "max_tokens": 5, "temperature": 0}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "llama", **body}})


def chat(content: str, **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 5, "temperature": 0, **body}


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{each}\n" for each in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(each) for each in text.splitlines()]


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """The replies by custom_id, each of which stands there once."""
    found = [each for each in read(path) if each["error"] is None]
    assert max(Counter(each["custom_id"] for each in found).values(), default=1) == 1
    assert all(each["response"]["status_code"] == 200 for each in found)
    return {each["custom_id"]: each["response"]["body"] for each in found}


def errors(path: Path) -> list[tuple[str | None, str, str]]:
    return [
        (each["custom_id"], each["error"]["code"], each["error"]["message"]) for each in read(path) if each["error"]
    ]


def test_chats_and_completions_are_answered_in_openais_shapes(llm: LLM, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        line("chat", CHAT, **chat("Hi")),
        line("text", prompt="The chairlift", max_tokens=4, temperature=0),
        line("several", prompt=["A", [5, 6]], n=2, max_tokens=3, seed=1),
    )
    llm.reset_prefix_cache()
    assert run_batch(llm, source, tmp_path / "out.jsonl") == Tally(done=3, tokens=5 + 4 + 4 * 3)
    found = answers(tmp_path / "out.jsonl")

    [expected] = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0, max_tokens=5))
    reply = found["chat"]
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-") and reply["created"] > 0
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.outputs[0].text, "refusal": None}
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    prompt = len(expected.prompt_token_ids)
    assert reply["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 5,
        "total_tokens": prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }

    [plain] = llm.generate("The chairlift", SamplingParams(temperature=0, max_tokens=4))
    assert found["text"]["object"] == "text_completion"
    assert found["text"]["choices"][0]["text"] == plain.outputs[0].text
    assert [choice["index"] for choice in found["several"]["choices"]] == [0, 1, 2, 3]
    assert found["several"]["usage"]["completion_tokens"] == 12


def test_lines_that_begin_alike_tell_what_they_shared(llm: LLM, tmp_path: Path) -> None:
    prompt = list(range(10, 110))
    bodies = {"one": prompt, "two": prompt, "both": [prompt, prompt], "other": prompt[::-1]}
    lines = [line(name, prompt=each, max_tokens=2) for name, each in bodies.items()]
    llm.reset_prefix_cache()
    run_batch(llm, write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl")
    found = answers(tmp_path / "out.jsonl")
    told = {name: found[name]["usage"]["prompt_tokens_details"]["cached_tokens"] for name in bodies}
    assert told == {"one": 0, "two": 96, "both": 2 * 96, "other": 0}, "six blocks of 16 are full"


def test_log_probabilities_come_in_both_of_openais_shapes(llm: LLM, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        line("chat", CHAT, **chat("Hi", logprobs=True, top_logprobs=3)),
        line("chosen", CHAT, **chat("Hi", logprobs=True)),
        line("text", prompt="Hi", max_tokens=4, temperature=0, logprobs=2),
    )
    run_batch(llm, source, tmp_path / "out.jsonl")
    found = answers(tmp_path / "out.jsonl")
    content = found["chat"]["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    for token in content:
        assert len(token["top_logprobs"]) == 3
        likeliest = token["top_logprobs"][0]  # greedy: the chosen one
        assert (token["token"], token["logprob"]) == (likeliest["token"], likeliest["logprob"])
        assert bytes(token["bytes"]).decode(errors="replace") == token["token"]
        assert [each["logprob"] for each in token["top_logprobs"]] == sorted(
            (each["logprob"] for each in token["top_logprobs"]), reverse=True
        )
    assert [token["top_logprobs"] for token in found["chosen"]["choices"][0]["logprobs"]["content"]] == [[]] * 5
    text = found["text"]["choices"][0]["logprobs"]
    assert {len(column) for column in text.values()} == {4}
    assert text["text_offset"][0] == 0 and text["text_offset"] == sorted(text["text_offset"])
    assert all(token in top for token, top in zip(text["tokens"], text["top_logprobs"], strict=True))


BAD_LINES = {
    "not json": (None, "invalid_json"),
    "[1, 2]": (None, "invalid_line"),
    '{"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}': (None, "missing_custom_id"),
    '{"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}}': ("get", "invalid_method"),
    '{"custom_id": "url", "method": "POST", "url": "/v1/embeddings", "body": {}}': ("url", "invalid_url"),
    '{"custom_id": "body", "method": "POST", "url": "/v1/completions"}': ("body", "invalid_body"),
    line("hot", prompt="x", temperature=-1): ("hot", "invalid_request"),
    line("kind", prompt="x", max_tokens="ten"): ("kind", "invalid_request"),
    line("typo", prompt="x", temprature=1): ("typo", "invalid_request"),
    line("empty", prompt=""): ("empty", "invalid_request"),
    line("long", prompt=[5] * 600): ("long", "invalid_request"),
    line("half", prompt=["fine", [5] * 600], max_tokens=2): ("half", "invalid_request"),
    line("ids", prompt=[5, 100000]): ("ids", "invalid_request"),
    line("silent", CHAT, messages=[]): ("silent", "invalid_request"),
    line("image", CHAT, messages=[{"role": "user", "content": [{"type": "image_url"}]}]): ("image", "invalid_request"),
    line("stream", prompt="x", stream=True): ("stream", "invalid_request"),
    line("other", prompt="x", model="gpt-4o"): ("other", "model_not_found"),
    line("number", prompt="x", model=4): ("number", "invalid_request"),
}


def test_a_bad_line_becomes_an_error_line_and_the_job_goes_on(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("first"), *BAD_LINES, "", line("last"))
    out = tmp_path / "out.jsonl"
    tally = run_batch(llm, source, out)
    assert (tally.done, tally.failed, tally.skipped) == (2, len(BAD_LINES), 0)
    assert set(answers(out)) == {"first", "last"}
    assert Counter((custom_id, code) for custom_id, code, _ in errors(out)) == Counter(BAD_LINES.values())
    for each in read(out):
        if each["error"] and each["error"]["code"] == "invalid_request":
            assert each["response"]["status_code"] == 400
            assert each["response"]["body"]["error"]["message"] == each["error"]["message"]
    again = run_batch(llm, source, out)
    assert (again.done, again.failed, again.skipped) == (0, len(BAD_LINES), 2), "they have failed again"
    assert Counter((custom_id, code) for custom_id, code, _ in errors(out)) == Counter(BAD_LINES.values())


def test_a_failed_line_is_tried_again_and_its_error_line_removed(llm: LLM, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    foreign = {"id": "x", "custom_id": "elsewhere", "response": None, "error": {"code": "c", "message": "m"}}
    fine, bad = line("fine"), line("bad", prompt="x", temperature=-1)
    run_batch(llm, write(tmp_path / "in.jsonl", fine, bad, "not json"), out)
    write(out, *out.read_text().splitlines(), json.dumps(foreign))
    out.chmod(0o640)
    kept = [each for each in out.read_text().splitlines() if json.loads(each)["custom_id"] in ("fine", "elsewhere")]

    source = write(tmp_path / "in.jsonl", fine, line("bad"), line("third"))
    assert run_batch(llm, source, out) == Tally(done=2, skipped=1, tokens=10)
    assert set(answers(out)) == {"fine", "bad", "third"}
    assert [custom_id for custom_id, _, _ in errors(out)] == ["elsewhere"], "of a request that this input has not"
    assert out.read_text().splitlines()[:2] == kept, "what is kept stays as it was"
    assert out.stat().st_mode & 0o777 == 0o640
    assert {each.name for each in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}, "nothing temporary stays"


def test_an_error_that_stands_in_the_response_alone_is_tried_again_too(llm: LLM, tmp_path: Path) -> None:
    response = {"status_code": 400, "request_id": "r", "body": {"error": {"message": "m"}}}
    old = json.dumps({"id": "x", "custom_id": "a", "response": response, "error": None})
    out = write(tmp_path / "out.jsonl", old)
    assert run_batch(llm, write(tmp_path / "in.jsonl", line("a")), out).done == 1
    assert set(answers(out)) == {"a"}


KILLED_AT_THE_RENAME = """
import os, signal, sys
from pathlib import Path
from chairlift import LLM
from chairlift.offline.batch import run_batch
model, source, target = sys.argv[1:]
llm = LLM(model, progress=False)
sys.addaudithook(lambda event, _: os.kill(os.getpid(), signal.SIGKILL) if event == "os.rename" else None)
run_batch(llm, Path(source), Path(target))
"""


@pytest.mark.long
def test_a_job_killed_while_it_removes_error_lines_loses_nothing(llm: LLM, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run_batch(llm, write(tmp_path / "in.jsonl", line("a"), line("b", prompt=""), line("c")), out)
    before = out.read_bytes()
    source = write(tmp_path / "in.jsonl", line("a"), line("b"), line("c"))

    command = [sys.executable, "-c", KILLED_AT_THE_RENAME, str(tiny_model), str(source), str(out)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert out.read_bytes() == before, "the old file is untouched until the new one is complete"

    def interrupt(_tally: Tally) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(llm, source, out, interrupt)  # the error line is gone, the answer not there yet
    assert run_batch(llm, source, out).failed == 0
    assert set(answers(out)) == {"a", "b", "c"} and len(read(out)) == 3
    assert {each.name for each in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_a_link_to_the_output_file_stays_a_link(llm: LLM, tmp_path: Path) -> None:
    out = tmp_path / "link.jsonl"
    out.symlink_to(tmp_path / "real.jsonl")
    run_batch(llm, write(tmp_path / "in.jsonl", line("a", prompt="")), out)
    run_batch(llm, write(tmp_path / "in.jsonl", line("a")), out)
    assert out.is_symlink() and set(answers(tmp_path / "real.jsonl")) == {"a"}


@pytest.mark.parametrize("name", [None, "", "llama", "as given"])
def test_a_line_may_call_the_model_by_its_own_names_or_by_none(
    llm: LLM, tiny_model: Path, tmp_path: Path, name: str | None
) -> None:
    asked = str(tiny_model) if name == "as given" else name
    source = write(tmp_path / "in.jsonl", line("a", prompt="x", max_tokens=2, model=asked))
    assert run_batch(llm, source, tmp_path / "out.jsonl").done == 1


def test_a_line_that_names_another_model_is_an_error_that_says_which_is_loaded(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a", prompt="x", max_tokens=2, model="gpt-4o"))
    out = tmp_path / "out.jsonl"
    [failure] = run_batch(llm, source, out).failures
    assert (failure.line, failure.custom_id) == (1, "a")
    assert "model is 'gpt-4o', and the model loaded is" in failure.reason and "'llama'" in failure.reason
    assert read(out)[0]["response"]["status_code"] == 404
    run_batch(llm, source, out, served_model_name="gpt-4o")
    assert answers(out)["a"]["model"] == "gpt-4o"


def chairlift_batch(source: Path, out: Path, model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chairlift", "batch", str(source), str(out), "--model", str(model)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.long
def test_the_command_fails_with_a_summary_while_a_line_fails(tiny_model: Path, tmp_path: Path) -> None:
    bad = [line(f"bad{i}", prompt="x", temperature=-1) for i in range(6)]
    source = write(tmp_path / "in.jsonl", line("fine"), "not json", *bad)
    out = tmp_path / "out.jsonl"
    failed = chairlift_batch(source, out, tiny_model)
    assert failed.returncode == 1 and failed.stdout == ""
    told = failed.stderr.splitlines()
    assert told[0].startswith("1 done, 7 failed, 0 answered before; 5 tokens")
    assert told[1].startswith("  line 2: not JSON")
    assert told[2].startswith("  line 3, custom_id 'bad0': temperature is -1")
    assert told[6:] == [
        f"  and 2 more: each has an error line in {out}",
        f"correct them in {source} and run the command again: only failed requests are retried",
    ]
    write(source, line("fine"), *(line(f"bad{i}") for i in range(6)))
    done = chairlift_batch(source, out, tiny_model)
    assert (done.returncode, done.stderr.splitlines()[1:]) == (0, [])
    assert done.stderr.startswith("6 done, 0 failed, 1 answered before;")
    assert len(read(out)) == len(answers(out)) == 7


@pytest.mark.long
def test_files_that_cannot_be_a_job_are_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"))
    no_model = tmp_path / "no-model"
    for out, message in (
        (tmp_path, "is a folder: name a file for the answers"),
        (tmp_path / "no" / "out.jsonl", "there is no folder"),
        (source, "both the input and the output"),
        (Path("/dev/null"), "is no regular file"),
    ):
        failed = chairlift_batch(source, out, no_model)
        assert failed.returncode == 1 and message in failed.stderr and failed.stderr.count("\n") == 1


def test_a_repeated_custom_id_is_answered_once_and_the_repetition_is_an_error(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"), line("b"), line("a"))
    out = tmp_path / "out.jsonl"
    run_batch(llm, source, out)
    assert set(answers(out)) == {"a", "b"}
    repeated = (None, "duplicate_custom_id", "custom_id 'a' is on an earlier line too")
    assert errors(out) == [repeated], "a custom_id has one line"
    # Killed when only the repetition had been written off: the first of the two is still to be answered.
    write(out, *(json.dumps(each) for each in read(out) if each["error"]))
    assert run_batch(llm, source, out).done == 2
    assert set(answers(out)) == {"a", "b"} and len(read(out)) == 3


def test_each_custom_id_has_one_line_even_if_a_line_with_it_is_no_request(llm: LLM, tmp_path: Path) -> None:
    first, second = line("a", "/v1/nothing"), line("b")
    source = write(tmp_path / "in.jsonl", first, line("a"), second, line("b", "/v1/nothing"))
    out = tmp_path / "out.jsonl"
    for _ in range(2):
        run_batch(llm, source, out)
        assert Counter(each["custom_id"] for each in read(out)) == {"a": 1, "b": 1, None: 2}
    assert set(answers(out)) == {"b"}


def test_a_torn_last_line_is_cut_off_and_its_request_answered_again(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(line(f"r{i}") for i in range(6)))
    out = tmp_path / "out.jsonl"
    run_batch(llm, source, out)
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    tally = run_batch(llm, source, out)
    assert (tally.done, tally.skipped) == (1, 5)
    assert set(answers(out)) == {f"r{i}" for i in range(6)}
    assert out.read_bytes().startswith(whole[: whole[:-1].rindex(b"\n") + 1])


def test_a_whole_last_line_without_its_newline_is_kept(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"), line("b"))
    out = tmp_path / "out.jsonl"
    run_batch(llm, source, out)
    whole = out.read_bytes()
    out.write_bytes(whole[:-1])
    assert run_batch(llm, source, out).skipped == 2
    assert out.read_bytes() == whole


@pytest.mark.parametrize("text", ["my notes", '{"custom_id": "a"', "[1, 2]"])
def test_a_last_line_that_no_job_wrote_is_not_cut(llm: LLM, tmp_path: Path, text: str) -> None:
    source = write(tmp_path / "in.jsonl", line("a"))
    out = tmp_path / "notes.txt"
    out.write_text(text)
    with pytest.raises(ChairliftError, match="line 1, is no batch result"):
        run_batch(llm, source, out)
    assert out.read_text() == text


def test_a_file_that_holds_no_batch_results_is_left_alone(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"))
    out = write(tmp_path / "notes.txt", "my notes", "half a li")
    before = out.read_bytes()
    with pytest.raises(ChairliftError, match="line 1, is no batch result"):
        run_batch(llm, source, out)
    assert out.read_bytes() == before
    with pytest.raises(ChairliftError, match="both the input and the output"):
        run_batch(llm, source, source)


def test_two_jobs_do_not_write_to_one_file(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"), line("b"))
    out = tmp_path / "out.jsonl"

    def second(_tally: Tally) -> None:
        with pytest.raises(ChairliftError, match="in use by another job"):
            run_batch(llm, source, out)

    assert run_batch(llm, source, out, second).done == 2


@pytest.mark.long
def test_a_killed_job_goes_on_where_it_was_and_answers_every_request_once(
    llm: LLM, tiny_model: Path, tmp_path: Path
) -> None:
    ids = [f"r{i}" for i in range(400)]
    source = write(tmp_path / "in.jsonl", *(line(each, prompt=f"ski {each}", max_tokens=60) for each in ids))
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "chairlift", "batch", str(source), str(out), "--model", str(tiny_model)]
    job = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not out.exists() or out.read_bytes().count(b"\n") < 20:
            assert job.poll() is None and time.monotonic() < deadline, "the job ended before it could be killed"
            time.sleep(0.002)
        os.kill(job.pid, signal.SIGKILL)
    finally:
        job.kill()
        job.communicate()
    kept = out.read_bytes()
    done = kept.count(b"\n")
    assert 20 <= done < len(ids), "it must have been killed in the middle"
    tally = run_batch(llm, source, out)
    assert (tally.done, tally.skipped, tally.failed) == (len(ids) - done, done, 0)
    assert set(answers(out)) == set(ids) and len(read(out)) == len(ids)
    assert out.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])


def test_iterate_takes_requests_only_as_others_end(llm: LLM) -> None:
    taken = 0

    def endless() -> Iterator[tuple[int, Prompt, SamplingParams]]:
        nonlocal taken
        for number in count():
            taken += 1
            yield number, [5, 6, 7], SamplingParams(temperature=0, max_tokens=1 + number % 3, ignore_eos=True)

    results = llm.iterate(endless(), window=4)
    for ended in range(1, 30):
        number, output = next(results)
        assert isinstance(output, RequestOutput) and len(output.outputs[0].token_ids) == 1 + number % 3
        assert taken <= ended + 4
    results.close()  # type: ignore[attr-defined]
    assert not llm.engine.scheduler.has_work


def test_iterate_yields_a_refusal_in_place_of_an_answer(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    asked: list[tuple[str, Prompt, SamplingParams]] = [("long", [5] * 600, params), ("fine", [5], params)]
    found = dict(llm.iterate(asked))
    assert isinstance(found["long"], RequestError) and isinstance(found["fine"], RequestOutput)
    assert dict(llm.iterate([("long", [5] * 600, params)] * 3, window=1)).keys() == {"long"}
