"""Batch jobs: a file of requests to a file of answers, in OpenAI's batch format; safe to interrupt.

Each answer is appended when its request ends, in any order. A job that runs again answers the requests without an
answer: those not reached before, and those that failed. An invalid line is an error in its own answer and affects no
other line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from chairlift.core.errors import ChairliftError, RequestError
from chairlift.core.params import SamplingParams
from chairlift.core.values import one_line, show
from chairlift.models.sources import names_of
from chairlift.offline.batch_output import BatchOutput, Report, Tally, check_output
from chairlift.openai import params as asked
from chairlift.openai import replies
from chairlift.openai.conversation import read_messages
from chairlift.text.infill import fill_in

if TYPE_CHECKING:
    from chairlift.offline.llm import LLM, Prompt
    from chairlift.text.outputs import RequestOutput

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class BadLineError(ChairliftError):
    """An input line that is not a request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


class WrongModelError(RequestError):
    """A request for a model that is not loaded."""


@dataclass(slots=True, eq=False)
class Job:
    """One input line in progress: a completion may have several prompts, each a separate request."""

    line: int
    custom_id: str
    is_chat: bool
    params: SamplingParams
    prompts: list[Prompt]
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    is_written: bool = False


def run_batch(
    llm: LLM,
    source: Path,
    target: Path,
    report: Report = lambda _tally: None,
    *,
    served_model_name: str | None = None,
) -> Tally:
    """Answer every line of `source` without an answer in `target`.

    A line may name the model by `served_model_name` or, if that is None, by any of the model's own names.
    """
    check_files(source, target)
    names = names_of(llm.model) if served_model_name is None else frozenset({served_model_name})
    with BatchOutput(target, report) as output, source.open("rb") as lines:
        retry_failures(source, output)
        for (job, place), outcome in llm.iterate(_requests(llm, lines, output, names)):
            if job.is_written:
                continue  # another prompt of the line has failed
            if isinstance(outcome, RequestError):
                output.refuse(job.line, job.custom_id, str(outcome))
            elif error := next((answer.error for answer in outcome.outputs if answer.error), None):
                output.fail(job.line, job.custom_id, error)
            else:
                job.outputs[place] = outcome
                if len(job.outputs) < len(job.prompts):
                    continue
                _write_answer(job, llm, served_model_name or llm.model, output)
            job.is_written = True
        return output.tally


def check_files(source: Path, target: Path) -> None:
    """Raise an error for files that cannot be a job's input and output, before a model is loaded."""
    check_output(target)
    if not source.is_file():
        raise ChairliftError(f"{source} is no regular file, and a job reads its input more than once: name a file")
    if target.exists() and source.samefile(target):
        raise ChairliftError(f"{source} is both the input and the output: name another file for the answers")


def count_lines(source: Path) -> int:
    """Return the number of requests in a file."""
    with source.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def retry_failures(source: Path, output: BatchOutput) -> None:
    """Remove error lines of earlier runs where the input has their requests: they run again."""
    if output.has_failures:
        output.remove_failures(_custom_ids(source))


def _custom_ids(source: Path) -> set[str]:
    """Return the custom_ids of all lines that have one, those of invalid lines included."""
    found = set()
    with source.open("rb") as lines:
        for line in lines:
            try:
                custom_id = json.loads(line)["custom_id"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(custom_id, str):
                found.add(custom_id)
    return found


def unanswered(lines: BinaryIO, output: BatchOutput) -> Iterator[tuple[int, str, str, dict[str, Any]]]:
    """Yield number, custom_id, url and body of each line without an answer; write an error for an invalid one."""
    seen: set[str | None] = {None}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            custom_id, url, body = read_line(line)
            if custom_id in seen:
                raise BadLineError(
                    "duplicate_custom_id", f"custom_id {show(custom_id)} is on an earlier line too", custom_id
                )
        except BadLineError as error:
            # The output has one line for each custom_id: the one of the first input line with it.
            output.write_off(number, None if error.custom_id in seen else error.custom_id, error.code, str(error))
            seen.add(error.custom_id)
            continue
        seen.add(custom_id)
        if custom_id in output.answered:
            output.skip()
            continue
        yield number, custom_id, url, body


def _requests(
    llm: LLM, lines: BinaryIO, output: BatchOutput, names: Set[str]
) -> Iterator[tuple[tuple[Job, int], Prompt, SamplingParams]]:
    """Yield the requests without an answer; write an error for an invalid line at once."""
    for number, custom_id, url, body in unanswered(lines, output):
        try:
            check_model(body.get("model"), names)
            job = read_job(llm, number, custom_id, url, body)
        except WrongModelError as error:
            output.refuse(number, custom_id, str(error), 404, "model_not_found")
            continue
        except RequestError as error:
            output.refuse(number, custom_id, str(error))
            continue
        except Exception as error:  # ours or a library's: one line must not end a job and every later run of it
            output.fail(number, custom_id, f"the line cannot be read: {type(error).__name__}: {one_line(error)}")
            continue
        for place, prompt in enumerate(job.prompts):
            yield (job, place), prompt, job.params


def read_line(line: bytes) -> tuple[str, str, dict[str, Any]]:
    """Return the custom_id, url and body of a batch line.

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
        raise BadLineError("invalid_method", f"method is {show(found['method'])}: use POST", custom_id)
    if url not in (CHAT, COMPLETIONS):
        raise BadLineError("invalid_url", f"url is {show(url)}: use {CHAT} or {COMPLETIONS}", custom_id)
    if not isinstance(body, dict):
        raise BadLineError("invalid_body", "body must be an object", custom_id)
    return custom_id, url, body


def check_model(asked: object, names: Set[str]) -> None:
    """Raise RequestError for another model; a missing or empty name means the loaded model, as on a server."""
    if asked is not None and not isinstance(asked, str):
        raise RequestError(f"model is {show(asked)}: use a string")
    if asked and asked not in names:
        raise WrongModelError(
            f"model is {show(asked)}, and the model loaded is {' or '.join(sorted(map(repr, names)))}: correct the "
            f"line, or run with --served-model-name {show(asked)} if it means this model"
        )


def check_whole(body: dict[str, Any]) -> None:
    """Raise RequestError for a request that asks for a stream."""
    if body.get("stream"):
        raise RequestError("stream is true, but a batch answers in whole lines: leave it out")


def read_job(llm: LLM, line: int, custom_id: str, url: str, body: dict[str, Any]) -> Job:
    """Return a line's prompts and sampling parameters; RequestError if they are invalid."""
    check_whole(body)
    if url == CHAT:
        params = asked.read_chat_params(body, llm.defaults.values)
        prompt = llm.read_chat(
            read_messages(body),
            tools=body.get("tools"),
            tool_choice=body.get("tool_choice"),
            parallel_tool_calls=body.get("parallel_tool_calls"),
            max_thinking_tokens=asked.read_thinking(body),
            chat_template_kwargs=asked.read_template_options(body),
        )
        return Job(line, custom_id, True, params, [prompt])
    params = asked.read_completion_params(body, llm.defaults.values)
    prompts = asked.read_prompts(body)
    if suffix := asked.read_suffix(body, prompts):
        prompts = [fill_in(str(prompt), suffix, llm.get_tokenizer()) for prompt in prompts]
    return Job(line, custom_id, False, params, list(prompts))


def _write_answer(job: Job, llm: LLM, model: str, output: BatchOutput) -> None:
    try:
        body = _body(job, llm, model)
    except Exception as error:  # ours or a library's: one answer must not end a job
        output.fail(job.line, job.custom_id, f"the answer cannot be written: {type(error).__name__}: {one_line(error)}")
    else:
        output.answer(job.custom_id, body)


def _body(job: Job, llm: LLM, model: str) -> dict[str, Any]:
    if job.is_chat:
        output = job.outputs[0]
        return replies.chat_completion(output, model, job.params.logprobs, llm.tokenizer, form=output.form)
    outputs = [job.outputs[place] for place in range(len(job.prompts))]
    return replies.text_completion(outputs, model, llm.tokenizer)
