"""Reader: turns a request's body into prompts for the engine, validated, templated, tokenized and within bounds."""

from __future__ import annotations

import inspect
import secrets
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import msgspec

from chairlift.core.errors import ContextLengthError, RequestError
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.request import Request
from chairlift.core.structured import Structured
from chairlift.offline.vocabulary import all_eos_ids
from chairlift.openai.params import (
    Body,
    get,
    read_chat_params,
    read_completion_params,
    read_prediction,
    read_prompts,
    read_suffix,
    read_template_options,
    read_thinking,
)
from chairlift.openai.tools import ToolUse, enforced, read_tools
from chairlift.serving.generation import EncodedPrompt
from chairlift.serving.messages import Hello
from chairlift.serving.text_jobs import Chat, CheckGrammar, Encode, Encoded, Job, Prompt, Room, estimate, perform
from chairlift.serving.text_pool import TextPool
from chairlift.text.infill import fill_in
from chairlift.text.message import Family
from chairlift.text.template import render
from chairlift.text.tokenizer import Tokenizer

T = TypeVar("T")

# The most entries that a field may have.
MOST = {
    "messages": 4096,
    "stop": 32,
    "bad_words": 256,
    "stop_token_ids": 256,
    "logit_bias": 1024,
    "allowed_token_ids": 1 << 18,
    "prompt": 256,
}
LONGEST = {"stop": 1024, "bad_words": 128}  # characters of an entry: every step searches the text for each of them
_REPEATED = 1 << 20  # token ids that a call sends with each of its prompts, summed over the prompts
INLINE = 2000  # characters that tokenize in 1 to 2 ms: less than a round trip to a text process
_GRAMMARS, _GRAMMAR_CHARACTERS = 256, 4 << 20  # checked grammars to keep
_EACH = 32  # characters of fixed cost per string
# Template variables that the server sets: chat_template_kwargs may not override them.
_OURS = frozenset(inspect.signature(render).parameters) - {"kwargs"}


class Attend(Protocol):
    """Awaits work, and cancels it if the client disconnects."""

    async def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of the work."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads requests for one model: short texts in this process, long ones in the text processes of `pool`."""

    model: str
    tokenizer: Tokenizer | None
    no_tokenizer: str  # the reason, if tokenizer is None
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values of sampling fields that a request leaves out
    pool: TextPool = field(kw_only=True)
    family: Family = field(default_factory=Family, kw_only=True)
    grammars: OrderedDict[Structured, str] = field(default_factory=OrderedDict, kw_only=True)  # checked ones

    async def chat(self, body: Body, hello: Hello, attend: Attend) -> list[EncodedPrompt]:
        """Read a chat completion: one prompt."""
        check_sizes(body)
        params, use, budget = read_chat_params(body, self.defaults), read_tools(body), read_thinking(body)
        shows_reasoning = get(body, "include_reasoning", "true or false") is not False
        self._require_for_words(params)
        job = self.chat_job(body, room_of(hello, params), params.bad_words, use)
        encoded = await self._encode(msgspec.structs.replace(job, prediction=read_prediction(body)), attend)
        try:
            [ready] = self._ask([(None, encoded.prompts[0])], encoded.words, params, hello)
        except ContextLengthError as error:
            error.field = "messages"
            raise
        tokenizer, family = self.require_tokenizer(), self.family
        form = family.form([] if use is None else use.tools, shows_reasoning=shows_reasoning)
        structured = enforced(use, params.structured, family.dialect, tokenizer)
        return [
            replace(
                ready,
                grammar=await self._grammar(structured, attend),
                thinking=family.thinking(tokenizer, encoded.is_open, encoded.is_closed, budget),
                form=form.opened(encoded.is_open),
                prediction=encoded.prediction,
            )
        ]

    async def _grammar(self, structured: Structured | None, attend: Attend) -> str:
        """Check what an answer must match in a text process, and return the grammar."""
        if structured is None:
            return ""
        self.require_tokenizer()
        if (known := self.grammars.get(structured)) is not None:
            self.grammars.move_to_end(structured)
            return known
        pieces = await attend(self.pool.do(CheckGrammar(structured)))
        assert isinstance(pieces, list)
        source = self.grammars[structured] = b"".join(pieces).decode()
        while len(self.grammars) > _GRAMMARS or sum(map(len, self.grammars.values())) > _GRAMMAR_CHARACTERS:
            self.grammars.popitem(last=False)
        return source

    async def completion(self, body: Body, hello: Hello, attend: Attend) -> list[EncodedPrompt]:
        """Read a plain completion: one prompt or several."""
        prompts = read_prompts(body)
        if len(prompts) > MOST["prompt"]:
            raise RequestError(f"prompt has {len(prompts)} entries: send at most {MOST['prompt']} in one request")
        check_sizes({name: value for name, value in body.items() if name != "prompt"})
        params = read_completion_params(body, self.defaults)
        self._require_for_words(params)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if suffix := read_suffix(body, prompts):
            texts = [fill_in(text, suffix, self.require_tokenizer()) for text in texts]
        room = room_of(hello, params)
        self._check_texts(texts, room, params, hello)
        encoded = Encoded([], [])
        if texts or params.bad_words:
            encoded = await self._encode(Encode(texts, room, words=list(params.bad_words)), attend)
        found = iter(encoded.prompts)
        read: list[tuple[str | None, Prompt]] = []
        for each in prompts:
            read.append((each, next(found)) if isinstance(each, str) else (None, Prompt(len(each), each)))
        ready = self._ask(read, encoded.words, params, hello)
        if params.structured is None:
            return ready
        grammar = await self._grammar(params.structured, attend)
        return [replace(each, grammar=grammar) for each in ready]

    def _check_texts(self, texts: list[str], room: Room, params: SamplingParams, hello: Hello) -> None:
        """Reject a text that by its size alone exceeds the context."""
        for text in texts:
            tokenizer = self.require_tokenizer()
            if not text:
                raise RequestError("prompt is empty: give at least one character")
            if room.keep is None and (least := estimate(text, room.most, tokenizer)) is not None:
                raise ContextLengthError(least, params.max_tokens, hello.max_length, is_estimate=True)

    def _require_for_words(self, params: SamplingParams) -> None:
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise RequestError(f"stop and bad_words cannot be read: {self.no_tokenizer}; use stop_token_ids")

    def chat_job(self, body: Body, room: Room, words: Sequence[str] = (), use: ToolUse | None = None) -> Chat:
        """Return the job that turns a conversation into token ids with the model's chat template."""
        if self.require_tokenizer().chat_template is None:
            raise RequestError(f"{self.model} has no chat template: use /v1/completions with a plain prompt")
        options = read_template_options(body)
        if taken := (get(body, "chat_template_kwargs", "an object") or {}).keys() & _OURS:
            raise RequestError(f"chat_template_kwargs has {', '.join(sorted(taken))}: the server sets these itself")
        tools = [] if use is None else use.shown
        adds_tools = bool(tools) and not self.family.shows_tools
        return Chat(body.get("messages"), options, room, list(words), tools, adds_tools, self.family.reasoning)

    async def do(self, job: Job, size: int, attend: Attend) -> Encoded | list[bytes]:
        """Run a job: in this process if it is short, else in a text process."""
        if size <= INLINE and not isinstance(job, Chat):
            found = perform(job, self.tokenizer)
            return [found] if isinstance(found, bytes) else found
        return await attend(self.pool.do(job))

    async def _encode(self, job: Encode | Chat, attend: Attend) -> Encoded:
        strings = [
            *job.words,
            *job.words,
            *(job.texts if isinstance(job, Encode) else ()),
        ]  # a word is tokenized with and without a leading space
        found = await self.do(job, sum(map(len, strings)) + _EACH * len(strings), attend)
        assert isinstance(found, Encoded)
        return found

    def _ask(
        self, read: list[tuple[str | None, Prompt]], words: list[list[int]], params: SamplingParams, hello: Hello
    ) -> list[EncodedPrompt]:
        """Check each prompt against the limits and return it ready for the engine."""
        limits = limits_of(hello)
        bad_words = tuple(map(tuple, words))
        check_repeated(len(read), params, sum(map(len, words)))
        ends = all_eos_ids(self.tokenizer, hello.eos_ids, hello.vocab_size)
        ready: list[EncodedPrompt] = []
        for text, prompt in read:
            if prompt.count and not prompt.ids:
                raise ContextLengthError(
                    prompt.count, params.max_tokens, hello.max_length, is_estimate=prompt.is_estimate
                )
            ids = limits.truncate(prompt.ids, params)
            if ready:
                limits.check_prompt(ids, params)  # the other fields are the same for all prompts
            else:
                limits.check(Request("", ids, params, eos_ids=ends, bad_words=bad_words))
            ready.append(
                EncodedPrompt(
                    # An echo shows only what the model has read: not a text that was truncated.
                    text if len(ids) == prompt.count else None,
                    ids,
                    params,
                    seed=secrets.randbits(63) if params.seed is None else params.seed,
                    eos_ids=sorted(ends),
                    bad_words=words,
                )
            )
        return ready

    def require_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, or raise a RequestError with the reason why there is none."""
        if self.tokenizer is None:
            raise RequestError(f"text cannot be read: {self.no_tokenizer}; send /v1/completions a list of token ids")
        return self.tokenizer


def limits_of(hello: Hello) -> Limits:
    """Return the engine's limits."""
    return Limits(hello.max_sequences, hello.step_tokens, hello.max_length, hello.vocab_size)


def room_of(hello: Hello, params: SamplingParams) -> Room:
    """Return how many tokens a prompt may have, and how many are kept of a longer one."""
    return Room(hello.max_length - 1, limits_of(hello).kept_prompt_tokens(params))


def check_sizes(body: Mapping[str, Any]) -> None:
    """Reject lists with more than MOST entries and strings longer than LONGEST."""
    for name, most in MOST.items():
        value = body.get(name)
        if isinstance(value, (list, dict)) and len(value) > most:
            raise RequestError(f"{name} has {len(value)} entries: send at most {most}")
    for name, longest in LONGEST.items():
        strings = body.get(name)
        for text in [strings] if isinstance(strings, str) else strings if isinstance(strings, list) else ():
            if isinstance(text, str) and len(text) > longest:
                raise RequestError(f"{name} has an entry of {len(text)} characters: use at most {longest}")


def check_repeated(prompts: int, params: SamplingParams, bad_words: int) -> None:
    """Reject a call if the token ids that are sent with each prompt are too many in all."""
    each = bad_words + len(params.allowed_token_ids or ()) + len(params.logit_bias) + len(params.stop_token_ids)
    if prompts * each > _REPEATED:
        raise RequestError(
            f"prompt has {prompts} entries, each of which is sent to the engine with {each:,} token ids of bad_words, "
            f"allowed_token_ids, logit_bias and stop_token_ids: {prompts * each:,} in all, and the most is "
            f"{_REPEATED:,}; send fewer prompts in one request"
        )
