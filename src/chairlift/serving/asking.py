"""From a request's body to what the engine is asked: validated, templated, tokenized, within bounds."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from chairlift.core.errors import ContextLengthError, RequestError
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.request import Request
from chairlift.openai.params import (
    Body,
    get,
    read_chat_params,
    read_completion_params,
    read_prompts,
    read_template_options,
)
from chairlift.serving.generation import Asked
from chairlift.serving.messages import Hello
from chairlift.serving.text_jobs import Chat, Encode, Encoded, Job, Prompt, Room, estimate, perform
from chairlift.serving.text_pool import TextPool
from chairlift.text.template import render
from chairlift.text.tokenizer import Tokenizer

T = TypeVar("T")

# How many entries a field may have: more is a mistake or an attack.
MOST = {
    "messages": 4096,
    "stop": 32,
    "bad_words": 256,
    "stop_token_ids": 256,
    "logit_bias": 1024,
    "allowed_token_ids": 1 << 18,
    "prompt": 256,
}
LONGEST = {"stop": 1024, "bad_words": 128}  # characters of an entry: every step looks for all of them
_REPEATED = 1 << 20  # token ids that go to the engine with every prompt of a call, in all
INLINE = 2000  # characters that take a millisecond or two to tokenize: less than it takes to have it done elsewhere
_EACH = 32  # characters that a string costs beside its own
# A template is the operator's; these names are how we fill it in.
_OURS = frozenset(inspect.signature(render).parameters) - {"kwargs"}


class Attend(Protocol):
    """Awaits work for a client that may leave before it is done."""

    async def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads requests for one model. What is short is read at once, what is long in the text processes of `pool`."""

    model: str
    tokenizer: Tokenizer | None
    no_tokenizer: str  # why there is none
    defaults: Mapping[str, Any] = field(default_factory=dict)  # sampling fields of requests that do not name them
    pool: TextPool = field(kw_only=True)

    async def chat(self, body: Body, hello: Hello, attend: Attend) -> list[Asked]:
        """A chat completion: one prompt."""
        check_sizes(body)
        params = read_chat_params(body, self.defaults)
        self._require_for_words(params)
        encoded = await self._encode(self.chat_job(body, room_of(hello, params), params.bad_words), attend)
        try:
            return self._ask([(None, encoded.prompts[0])], encoded.words, params, hello)
        except ContextLengthError as error:
            error.field = "messages"
            raise

    async def completion(self, body: Body, hello: Hello, attend: Attend) -> list[Asked]:
        """A plain completion: one prompt or several."""
        prompts = read_prompts(body)
        if len(prompts) > MOST["prompt"]:
            raise RequestError(f"prompt has {len(prompts)} entries: send at most {MOST['prompt']} in one request")
        check_sizes({name: value for name, value in body.items() if name != "prompt"})
        params = read_completion_params(body, self.defaults)
        self._require_for_words(params)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        room = room_of(hello, params)
        self._check_texts(texts, room, params, hello)
        encoded = Encoded([], [])
        if texts or params.bad_words:
            encoded = await self._encode(Encode(texts, room, words=list(params.bad_words)), attend)
        found = iter(encoded.prompts)
        read: list[tuple[str | None, Prompt]] = []
        for each in prompts:
            read.append((each, next(found)) if isinstance(each, str) else (None, Prompt(len(each), each)))
        return self._ask(read, encoded.words, params, hello)

    def _check_texts(self, texts: list[str], room: Room, params: SamplingParams, hello: Hello) -> None:
        """Refuse a text that cannot fit the context by its size alone."""
        for text in texts:
            tokenizer = self.require_tokenizer()
            if not text:
                raise RequestError("prompt is empty: give at least one character")
            if room.keep is None and (least := estimate(text, room.most, tokenizer)) is not None:
                raise ContextLengthError(least, params.max_tokens, hello.max_length, is_estimate=True)

    def _require_for_words(self, params: SamplingParams) -> None:
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise RequestError(f"stop and bad_words cannot be read: {self.no_tokenizer}; use stop_token_ids")

    def chat_job(self, body: Body, room: Room, words: Sequence[str] = ()) -> Chat:
        """What turns a conversation into token ids, through the model's own template."""
        if self.require_tokenizer().chat_template is None:
            raise RequestError(f"{self.model} has no chat template: use /v1/completions with a plain prompt")
        options = read_template_options(body)
        if taken := (get(body, "chat_template_kwargs", "an object") or {}).keys() & _OURS:
            raise RequestError(f"chat_template_kwargs has {', '.join(sorted(taken))}: such names are the server's own")
        return Chat(body.get("messages"), options, room, list(words))

    async def do(self, job: Job, size: int, attend: Attend) -> Encoded | list[bytes]:
        """Do a job: at once if it is quick, else in a text process."""
        if size <= INLINE and not isinstance(job, Chat):
            found = perform(job, self.tokenizer)
            return [found] if isinstance(found, bytes) else found
        return await attend(self.pool.do(job))

    async def _encode(self, job: Encode | Chat, attend: Attend) -> Encoded:
        strings = [*job.words, *job.words, *(job.texts if isinstance(job, Encode) else ())]  # a word is spelled twice
        found = await self.do(job, sum(map(len, strings)) + _EACH * len(strings), attend)
        assert isinstance(found, Encoded)
        return found

    def _ask(
        self, read: list[tuple[str | None, Prompt]], words: list[list[int]], params: SamplingParams, hello: Hello
    ) -> list[Asked]:
        """Each prompt, with its text where it has one, ready for the engine."""
        limits = limits_of(hello)
        bad_words = tuple(map(tuple, words))
        check_repeated(len(read), params, sum(map(len, words)))
        ends = set(hello.eos_ids)
        own = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        if own is not None and own < hello.vocab_size:  # a tokenizer may have more tokens than the model
            ends.add(own)
        asked: list[Asked] = []
        for text, prompt in read:
            if prompt.count and not prompt.ids:
                raise ContextLengthError(
                    prompt.count, params.max_tokens, hello.max_length, is_estimate=prompt.is_estimate
                )
            ids = limits.truncate(prompt.ids, params)
            if asked:
                limits.check_prompt(ids, params)  # the rest is the same for all
            else:
                limits.check(Request("", ids, params, eos_ids=frozenset(ends), bad_words=bad_words))
            asked.append(
                Asked(
                    text if len(ids) == prompt.count else None,  # an echo shows what the model has read
                    ids,
                    params,
                    seed=secrets.randbits(63) if params.seed is None else params.seed,
                    eos_ids=sorted(ends),
                    bad_words=words,
                )
            )
        return asked

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, or a RequestError that says why there is none."""
        if self.tokenizer is None:
            raise RequestError(f"text cannot be read: {self.no_tokenizer}; send /v1/completions a list of token ids")
        return self.tokenizer


def limits_of(hello: Hello) -> Limits:
    """What the engine serves at most."""
    return Limits(hello.max_sequences, hello.step_tokens, hello.max_length, hello.vocab_size)


def room_of(hello: Hello, params: SamplingParams) -> Room:
    """How much of a prompt is of use."""
    return Room(hello.max_length - 1, limits_of(hello).kept_prompt_tokens(params))


def check_sizes(body: Mapping[str, Any]) -> None:
    """Refuse lists and strings that are longer than anyone needs."""
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
    """Refuse what is sent to the engine with each prompt, if it is too much in all."""
    each = bad_words + len(params.allowed_token_ids or ()) + len(params.logit_bias) + len(params.stop_token_ids)
    if prompts * each > _REPEATED:
        raise RequestError(
            f"prompt has {prompts} entries, each of which goes to the engine with {each:,} token ids of bad_words, "
            f"allowed_token_ids, logit_bias and stop_token_ids: {prompts * each:,} in all, and the most is "
            f"{_REPEATED:,}; send fewer prompts in one request"
        )
