"""RequestBuilder: builds the engine's Request from a prompt and its SamplingParams."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from chairlift.core.constraint import Constraint, Reasoning
from chairlift.core.errors import RequestError
from chairlift.core.params import SamplingParams
from chairlift.core.request import Request
from chairlift.core.settings import Settings
from chairlift.core.structured import Structured
from chairlift.execution.build import Built
from chairlift.offline.defaults import read_defaults
from chairlift.offline.processors import SafeProcessor
from chairlift.offline.prompts import PromptReader, Read
from chairlift.offline.vocabulary import all_eos_ids, read_tokenizer
from chairlift.openai.tools import enforced
from chairlift.text.grammar import Grammars

log = logging.getLogger("chairlift")


class RequestBuilder:
    """Builds the requests of one model: its tokenizer, its sampling defaults, request ids and seeds."""

    def __init__(self, model: str, built: Built, settings: Settings) -> None:
        self.tokenizer, missing = read_tokenizer(model, built.checkpoint)
        self.prompts = PromptReader(model, self.tokenizer, missing)
        self.defaults = read_defaults(built.checkpoint, settings.model.generation_config)
        for warning in self.defaults.warnings:
            log.warning(warning)
        self._built = built
        self._grammars: Grammars | None = None
        self._ids = count()
        self._seeds = random.Random(settings.model.seed)
        self._eos_ids = all_eos_ids(self.tokenizer, built.config.eos_ids, built.config.vocab_size)

    @property
    def grammars(self) -> Grammars:
        """The model's grammars, made when the first is needed."""
        if self._grammars is None:
            if self.tokenizer is None:
                raise RequestError(f"structured output needs a tokenizer: {self.prompts.no_tokenizer}")
            self._grammars = Grammars(self.tokenizer, self._built.config.vocab_size, sorted(self._eos_ids))
            self._built.use_masker(self._grammars)
        return self._grammars

    def new_id(self) -> str:
        """Return an id that no other request of this process has."""
        return f"r{next(self._ids)}"

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters of prompts without any."""
        return SamplingParams(**self.defaults.values)

    def build(
        self, request_id: str, read: Read, params: SamplingParams, fail: Callable[[str, str], None], **more: Any
    ) -> Request:
        """Return the request; if one of its logits processors fails, `fail` is called with its id and the error."""
        tokenizer = self.tokenizer
        if tokenizer is None and (params.stop or params.bad_words):
            raise RequestError(f"stop and bad_words cannot be read: {self.prompts.no_tokenizer}; use stop_token_ids")
        constraint = self._constraint(read, params)
        processors = (SafeProcessor(each, partial(fail, request_id)) for each in params.logits_processors or ())
        return Request(
            id=request_id,
            prompt=self._built.limits.truncate(read.ids, params),
            params=params,
            arrival=self._built.engine.clock.now(),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            eos_ids=self._eos_ids,
            bad_words=tuple(map(tuple, tokenizer.spell_words(params.bad_words))) if tokenizer else (),
            processors=tuple(processors),
            constraint=constraint,
            **more,
        )

    def _constraint(self, read: Read, params: SamplingParams) -> Constraint | None:
        """Compile what the answer must match, and bound its reasoning."""
        structured: Structured | None = params.structured
        if read.use is not None and self.tokenizer is not None:
            structured = enforced(read.use, structured, read.dialect, self.tokenizer)
        found: Constraint | None = None
        if structured is not None:
            found = self.grammars.constraint(self.grammars.check(structured))
        thinking = read.thinking
        if thinking is None or (found is None and thinking.budget is None):
            return found
        return Reasoning(thinking, found)
