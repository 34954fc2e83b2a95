"""A file of requests to a file of answers, in OpenAI's batch format: one continuous batch, safe to interrupt.

Each answer is appended when its request ends, in whatever order they do. The output file is the job's only state: what
stands there in whole lines is done, so a job that was killed goes on where it was.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from chairlift.core.errors import ChairliftError, RequestError
from chairlift.core.params import SamplingParams
from chairlift.openai import params as asked
from chairlift.openai import replies

if TYPE_CHECKING:
    from chairlift.llm import LLM, Prompt
    from chairlift.outputs import RequestOutput

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SYNC_SECONDS = 1.0  # what a power cut may cost; a killed process loses nothing that was written


@dataclass(slots=True)
class Tally:
    """How far a job has come."""

    done: int = 0
    failed: int = 0
    skipped: int = 0  # they had their line from an earlier run
    tokens: int = 0

    @property
    def lines(self) -> int:
        """Input lines dealt with."""
        return self.done + self.failed + self.skipped


Report = Callable[[Tally], None]


class BadLineError(ChairliftError):
    """A line of the input that is no request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(slots=True, eq=False)
class Job:
    """One line of the input on its way: a completion may bring several prompts, which are requests of their own."""

    custom_id: str
    is_chat: bool
    params: SamplingParams
    prompts: list[Prompt]
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    is_written: bool = False


def run_batch(llm: LLM, source: Path, target: Path, report: Report = lambda _tally: None) -> Tally:
    """Answer every line of `source` that has no line in `target` yet."""
    if target.exists() and source.samefile(target):
        raise ChairliftError(f"{source} is both the input and the output: name another file for the answers")
    with Results(target, report) as results, source.open("rb") as lines:
        for (job, place), outcome in llm.iterate(_requests(llm, lines, results)):
            if job.is_written:
                continue  # another prompt of its line has failed
            if isinstance(outcome, RequestError):
                results.refuse(job.custom_id, str(outcome))
            elif error := next((answer.error for answer in outcome.outputs if answer.error), None):
                results.fail(job.custom_id, error)
            else:
                job.outputs[place] = outcome
                if len(job.outputs) < len(job.prompts):
                    continue
                results.answer(job.custom_id, _body(job, llm))
            job.is_written = True
        return results.tally


def count_lines(source: Path) -> int:
    """How many requests a file holds."""
    with source.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _requests(llm: LLM, lines: BinaryIO, results: Results) -> Iterator[tuple[tuple[Job, int], Prompt, SamplingParams]]:
    """The requests that are still to be answered; a line that is none is written off at once."""
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            custom_id, url, body = read_line(line)
            if custom_id in seen:
                raise BadLineError("duplicate_custom_id", "its custom_id stands on an earlier line too", custom_id)
        except BadLineError as error:
            results.write_off(number, error)
            continue
        seen.add(custom_id)
        if custom_id in results.done:
            results.skip()
            continue
        try:
            job = read_job(llm, custom_id, url, body)
        except RequestError as error:
            results.refuse(custom_id, str(error))
            continue
        for place, prompt in enumerate(job.prompts):
            yield (job, place), prompt, job.params


def read_line(line: bytes) -> tuple[str, str, dict[str, Any]]:
    """The custom_id, url and body of a batch line.

    >>> read_line(b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}')
    ('a', '/v1/completions', {'prompt': 'Hi'})
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLineError("invalid_json", f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadLineError("invalid_line", "not an object with custom_id, method, url and body")
    custom_id, url, body = found.get("custom_id"), found.get("url"), found.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLineError("missing_custom_id", "custom_id must be a non-empty string")
    if found.get("method", "POST") != "POST":
        raise BadLineError("invalid_method", f"method is {found['method']!r}: use POST", custom_id)
    if url not in (CHAT, COMPLETIONS):
        raise BadLineError("invalid_url", f"url is {url!r}: use {CHAT} or {COMPLETIONS}", custom_id)
    if not isinstance(body, dict):
        raise BadLineError("invalid_body", "body must be an object", custom_id)
    return custom_id, url, body


def read_job(llm: LLM, custom_id: str, url: str, body: dict[str, Any]) -> Job:
    """What a line asks for, in our own terms, or a RequestError."""
    if body.get("stream"):
        raise RequestError("stream is true, but a batch answers in whole lines: leave it out")
    if url == CHAT:
        params = asked.read_chat_params(body, llm.defaults.values)
        prompt = llm.chat_prompt(asked.read_messages(body), chat_template_kwargs=asked.read_template_options(body))
        return Job(custom_id, True, params, [prompt])
    return Job(
        custom_id, False, asked.read_completion_params(body, llm.defaults.values), list(asked.read_prompts(body))
    )


def _body(job: Job, llm: LLM) -> dict[str, Any]:
    if job.is_chat:
        return replies.chat_completion(job.outputs[0], llm.model, job.params.logprobs, llm.tokenizer)
    outputs = [job.outputs[place] for place in range(len(job.prompts))]
    return replies.text_completion(outputs, llm.model, llm.tokenizer)


class Results:
    """The output file: what it holds already, and one more line at a time."""

    def __init__(self, path: Path, report: Report) -> None:
        self.done: set[str] = set()
        self.tally = Tally()
        self._bad_lines: set[int] = set()  # lines of the input that were written off
        self._path = path
        self._report = report
        self._synced = time.monotonic()
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise ChairliftError(f"{path} cannot be written: {error.strerror}") from None
        self._lock()
        self._read()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_error: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def answer(self, custom_id: str, body: dict[str, Any]) -> None:
        """A request was answered."""
        self.tally.done += 1
        self.tally.tokens += body["usage"]["completion_tokens"]
        self._write(custom_id, _response(200, body), None)

    def refuse(self, custom_id: str, message: str) -> None:
        """A request asks for what cannot be done."""
        self.tally.failed += 1
        body = replies.error_object(message)
        self._write(custom_id, _response(400, body), {"code": "invalid_request", "message": message})

    def fail(self, custom_id: str, message: str) -> None:
        """The engine failed a request."""
        self.tally.failed += 1
        body = replies.error_object(message, "server_error")
        self._write(custom_id, _response(500, body), {"code": "server_error", "message": message})

    def write_off(self, number: int, error: BadLineError) -> None:
        """A line of the input is no request: it is known by its number, as it may have no id that is its own."""
        if number in self._bad_lines:
            self.skip()
            return
        self.tally.failed += 1
        message = f"line {number}: {error}"
        self._write(error.custom_id, None, {"code": error.code, "message": message, "line": number})

    def skip(self) -> None:
        """A line has its result from an earlier run."""
        self.tally.skipped += 1
        self._report(self.tally)

    def _write(self, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        record = {"id": replies.new_id("batch_req"), "custom_id": custom_id, "response": response, "error": error}
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        now = time.monotonic()
        if now - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = now
        self._report(self.tally)

    def _lock(self) -> None:
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ChairliftError(f"{self._path} is in use by another job: wait for it, or name another file") from None

    def _read(self) -> None:
        """Learn what is done, and cut off a last line that a crash has torn."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                self._file.truncate(end)
                return
            end += len(line)
            try:
                record = json.loads(line)
                custom_id, error = record["custom_id"], record["error"] or {}
            except (ValueError, KeyError, TypeError):
                raise ChairliftError(
                    f"{self._path}, line {number}, is no batch result: is this the right file? Nothing was changed"
                ) from None
            # A written-off line says nothing of its custom_id: the earlier line with it may still be unanswered.
            if "line" in error:
                self._bad_lines.add(error["line"])
            else:
                self.done.add(custom_id)


def _response(status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": replies.new_id("req"), "body": body}
