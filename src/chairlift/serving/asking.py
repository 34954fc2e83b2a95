"""From a request's body to what the engine is asked: validated, templated, tokenized, within bounds."""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from chairlift.core.errors import ContextLengthError, RequestError
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.request import Request
from chairlift.openai.conversation import read_messages
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
from chairlift.text.template import render
from chairlift.text.tokenizer import Tokenizer
from chairlift.vocabulary import spell_bad_words

T = TypeVar("T")

# How many entries a field may have: more is a mistake or an attack.
MOST = {
    "messages": 4096,
    "stop": 32,
    "bad_words": 256,
    "stop_token_ids": 256,
    "logit_bias": 1024,
    "prompt": 256,
}
_LONGEST_STOP = 1024  # characters
_LARGE_TEXT = 20_000  # characters that take long enough to tokenize that the event loop must not wait for them
# A template is the operator's; these names are how we fill it in.
_OURS = frozenset(inspect.signature(render).parameters) - {"kwargs"}


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads requests for one model."""

    model: str
    tokenizer: Tokenizer | None
    no_tokenizer: str  # why there is none
    defaults: Mapping[str, Any] = field(default_factory=dict)  # sampling fields of requests that do not name them

    async def chat(self, body: Body, hello: Hello) -> list[Asked]:
        """A chat completion: one prompt."""
        check_sizes(body)
        params = read_chat_params(body, self.defaults)
        prompt = await self.chat_prompt(body)
        try:
            return [self._ask(None, prompt, params, hello)]
        except ContextLengthError as error:
            error.field = "messages"
            raise

    async def completion(self, body: Body, hello: Hello) -> list[Asked]:
        """A plain completion: one prompt or several."""
        prompts = read_prompts(body)
        if len(prompts) > MOST["prompt"]:
            raise RequestError(f"prompt has {len(prompts)} entries: send at most {MOST['prompt']} in one request")
        check_sizes({name: value for name, value in body.items() if name != "prompt"})
        params = read_completion_params(body, self.defaults)
        asked = []
        for prompt in prompts:
            text, ids = (prompt, await self.encode(prompt)) if isinstance(prompt, str) else (None, prompt)
            asked.append(self._ask(text, ids, params, hello))
        return asked

    async def chat_prompt(self, body: Body) -> list[int]:
        """The token ids of a conversation, through the model's own template."""
        tokenizer = self.require_tokenizer()
        template = tokenizer.chat_template
        if template is None:
            raise RequestError(f"{self.model} has no chat template: use /v1/completions with a plain prompt")
        extra = read_template_options(body)
        if taken := (get(body, "chat_template_kwargs", "an object") or {}).keys() & _OURS:
            raise RequestError(f"chat_template_kwargs has {', '.join(sorted(taken))}: such names are the server's own")

        def write() -> list[int]:
            messages = read_messages(body)
            text = render(template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, **extra)
            return tokenizer.encode(text, add_special_tokens=False)

        return await off_loop(write, len(str(body.get("messages"))))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        tokenizer = self.require_tokenizer()
        if not text:
            raise RequestError("prompt is empty: give at least one character")
        return await off_loop(lambda: tokenizer.encode(text, add_special_tokens), len(text))

    def decode(self, ids: list[int]) -> str:
        """The text of token ids."""
        return self.require_tokenizer().decode(ids, skip_special_tokens=False)

    def _ask(self, text: str | None, prompt: list[int], params: SamplingParams, hello: Hello) -> Asked:
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise RequestError(f"stop and bad_words cannot be read: {self.no_tokenizer}; use stop_token_ids")
        bad_words = spell_bad_words(params.bad_words, self.tokenizer)
        limits = Limits(hello.max_sequences, hello.step_tokens, hello.max_length, hello.vocab_size)
        kept = limits.truncate(prompt, params)
        if len(kept) < len(prompt):
            text, prompt = None, kept  # an echo shows what the model has read
        limits.check(Request("", prompt, params, bad_words=bad_words))
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= set(hello.eos_ids)
            own = self.tokenizer.eos_token_id if self.tokenizer is not None else None
            if own is not None and own < hello.vocab_size:  # a tokenizer may have more tokens than the model
                stops.add(own)
        return Asked(
            text,
            prompt,
            params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            stop_ids=sorted(stops),
            bad_words=[list(word) for word in bad_words],
        )

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, or a RequestError that says why there is none."""
        if self.tokenizer is None:
            raise RequestError(f"text cannot be read: {self.no_tokenizer}; send /v1/completions a list of token ids")
        return self.tokenizer


def check_sizes(body: Mapping[str, Any]) -> None:
    """Refuse lists that are longer than anyone needs."""
    for name, most in MOST.items():
        value = body.get(name)
        if isinstance(value, (list, dict)) and len(value) > most:
            raise RequestError(f"{name} has {len(value)} entries: send at most {most}")
    stops = body.get("stop")
    for stop in [stops] if isinstance(stops, str) else stops if isinstance(stops, list) else ():
        if isinstance(stop, str) and len(stop) > _LONGEST_STOP:
            raise RequestError(f"stop has an entry of {len(stop)} characters: use at most {_LONGEST_STOP}")


async def off_loop(work: Callable[[], T], size: int) -> T:
    """Do it here if it is quick, in a thread if it is not."""
    return await asyncio.to_thread(work) if size > _LARGE_TEXT else work()
