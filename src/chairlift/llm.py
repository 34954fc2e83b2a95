"""LLM: the engine in your own process, from text to text."""

from __future__ import annotations

import gc
import logging
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from chairlift.core.errors import RequestError
from chairlift.core.params import SamplingParams
from chairlift.core.request import Request
from chairlift.core.settings import Settings
from chairlift.defaults import read_defaults
from chairlift.execution.build import Built, build
from chairlift.keywords import check_params, either, refuse_unknown
from chairlift.models.sources import DEFAULT_MODEL
from chairlift.outputs import Chunk, RequestOutput
from chairlift.prompts import Message, Prompt, PromptReader, as_list
from chairlift.track import Track
from chairlift.vocabulary import read_tokenizer, spell_bad_words

__all__ = ["LLM", "Message", "Prompt"]
Params = SamplingParams | Sequence[SamplingParams]
K = TypeVar("K")
log = logging.getLogger("chairlift")


class LLM:
    """A model and the engine that runs it, in this process.

    >>> llm = LLM()                                           # doctest: +SKIP
    >>> llm.generate("The capital of France is")[0].outputs[0].text  # doctest: +SKIP
    ' Paris.'
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, progress: bool = True, **settings: Any) -> None:
        self.settings = Settings.of(**settings)
        self.model = model
        self._progress = progress
        self._built: Built = build(model, self.settings, progress=progress)
        self._built.engine.end_input()  # whoever calls us has given all there is before we step
        self.engine = self._built.engine
        self.config = self._built.config
        self.capacity = self._built.capacity
        self.tokenizer, missing = read_tokenizer(self._built.checkpoint)
        self._reader = PromptReader(model, self.tokenizer, missing)
        self.defaults = read_defaults(self._built.checkpoint, self.settings.model.generation_config)
        for warning in self.defaults.warnings:
            log.warning(warning)
        self._ids = count()
        self._seeds = random.Random(self.settings.model.seed)
        self._tracks: dict[str, Track] = {}
        self._listeners: dict[str, Track] = {}  # those that are told of each token

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Answer prompts (text or token ids), all in one continuous batch, in the order given.

        Without `params`, a prompt is sampled with `get_default_sampling_params()`; params that are given are taken as
        they are. `sampling_params` and `use_tqdm` are vLLM's names of `params` and `progress`.
        """
        refuse_unknown(unknown, is_chat=False)
        listed = as_list(prompts)
        choices = self._choose(either("params", params, "sampling_params", sampling_params), len(listed))
        progress = either("progress", progress, "use_tqdm", use_tqdm)
        tracks: list[Track] = []
        tokens, enough = 0, self._built.limits.step_tokens if self.engine.may_begin_early else math.inf
        with no_full_collections():
            try:
                for prompt, chosen in zip(listed, choices, strict=True):
                    tracks.append(self._submit(prompt, chosen))
                    tokens += len(tracks[-1].request.prompt)
                    if tokens >= enough:
                        self._step()  # the device begins with those who fill its first step, while the others come
                        enough = math.inf
                self._run(tracks, self._progress if progress is None else progress)
            finally:
                self._leave(tracks)
        return [track.output for track in tracks]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; further keywords are those of `chat_prompt`."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [self._reader.chat(conversation, **template) for conversation in conversations]
        params = either("params", params, "sampling_params", sampling_params)
        return self.generate(prompts, params, progress=either("progress", progress, "use_tqdm", use_tqdm))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool | None = None,  # a stream has no bar
        **unknown: Any,
    ) -> Iterator[Chunk]:
        """Answer one prompt piece by piece; leaving the loop early ends the request."""
        refuse_unknown(unknown, is_chat=False)
        [params] = self._choose(either("params", params, "sampling_params", sampling_params), 1)
        if params.width > params.n:
            raise RequestError(
                f"best_of is {params.best_of} and n is {params.n}: which answers are the best is known at their end; "
                "use generate(), or leave best_of out"
            )
        return self._stream(self._submit(prompt, params, is_streamed=True))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool | None = None,
        **template: Any,
    ) -> Iterator[Chunk]:
        """Answer a conversation piece by piece; further keywords are those of `chat_prompt`."""
        prompt = self._reader.chat(messages, **template)
        return self.stream(prompt, params, sampling_params=sampling_params)

    def iterate(
        self, requests: Iterable[tuple[K, Prompt, SamplingParams]], *, window: int | None = None
    ) -> Iterator[tuple[K, RequestOutput | RequestError]]:
        """Answer any number of requests, each yielded under its key as soon as it ends, in whatever order they do.

        Requests are taken from the iterable only while fewer than `window` are under way (default: four full batches),
        so it may be endless. One that is refused yields its error, and the others go on; one whose step failed has the
        error in its answers.
        """
        window = window or 4 * self._built.limits.max_sequences
        source = iter(requests)
        live: list[tuple[K, Track]] = []
        try:
            while (taken := list(islice(source, window - len(live)))) or live:
                for key, prompt, params in taken:
                    try:
                        live.append((key, self._submit(prompt, params)))
                    except RequestError as error:
                        yield key, error
                self._step()
                ended = [entry for entry in live if entry[1].output.finished]
                live = [entry for entry in live if not entry[1].output.finished] if ended else live
                for key, track in ended:
                    yield key, track.output
        finally:
            self._leave([track for _, track in live])

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> list[int]:
        """The token ids of a conversation, through the model's own chat template or the one given here.

        `chat_template_kwargs` holds variables of the template, such as {"enable_thinking": False}.
        """
        prompt = self._reader.chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            **unknown,
        )
        return list(prompt["prompt_token_ids"])

    def get_default_sampling_params(self) -> SamplingParams:
        """What a prompt is sampled with when no params are given: the model's own values, where it has some."""
        return SamplingParams(**self.defaults.values)

    def reset_prefix_cache(self) -> int:
        """Forget what later prompts could have shared; how many blocks of the KV cache it was."""
        return self.engine.clear_prefix_cache()

    def close(self) -> None:
        """End whatever still runs."""
        for request_id in list(self._tracks):
            self._dispatch(self.engine.abort(request_id), self._tracks)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- requests in

    def _choose(self, params: Params | None, count: int) -> list[SamplingParams]:
        """The sampling parameters of each of so many prompts."""
        check_params(params)
        choices = (
            list(params) if isinstance(params, Sequence) else [params or self.get_default_sampling_params()] * count
        )
        if len(choices) != count:
            raise RequestError(f"{count} prompts came with {len(choices)} sampling params: give one, or one for each")
        return choices

    def _submit(self, prompt: Prompt, params: SamplingParams, *, is_streamed: bool = False) -> Track:
        text, ids = self._reader.encode(prompt)
        tokenizer = self.tokenizer
        if tokenizer is None and (params.stop or params.bad_words):
            raise RequestError(f"stop and bad_words cannot be read: {self._reader.no_tokenizer}; use stop_token_ids")
        request = Request(
            id=f"r{next(self._ids)}",
            prompt=ids,
            params=params,
            arrival=self.engine.clock.now(),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            eos_ids=self._eos_ids(),
            bad_words=spell_bad_words(params.bad_words, tokenizer),
        )
        self.engine.submit(request)
        track = Track(request, text, tokenizer, is_streamed=is_streamed)
        self._tracks[request.id] = self._listeners[request.id] = track
        return track

    def _eos_ids(self) -> frozenset[int]:
        own = self.tokenizer.eos_token_id if self.tokenizer else None
        return self.config.eos_ids | (frozenset() if own is None else {own})

    # ---- news out

    def _run(self, tracks: list[Track], progress: bool) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
        )
        clock = self.engine.clock
        start = clock.now()
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
            task = bar.add_task("generating", total=len(tracks), speed="")
            tokens, shown = 0, start
            for track in tracks:
                while not track.output.finished:
                    tokens += self._step()
                    if progress and (now := clock.now()) - shown > 0.1:
                        shown, done = now, sum(each.output.finished for each in tracks)
                        bar.update(task, completed=done, speed=f"{tokens / (now - start):,.0f} tok/s")
        for track in tracks:
            if error := track.error:
                raise RequestError(f"request {track.request.id} failed: {error}")

    def _step(self) -> int:
        """One step of the engine; how many tokens it brought."""
        outcome = self.engine.step()
        self._dispatch(outcome.events, self._tracks)
        if self._listeners:
            self._dispatch(zip(outcome.sequences, outcome.tokens, strict=True), self._listeners)
        return len(outcome.tokens) + sum(event.token is not None for event in outcome.events)

    def _dispatch(self, news: Iterable[tuple[Any, ...]], tracks: dict[str, Track]) -> None:
        """Hand events, or as much of them as a token is, to their requests."""
        now = self.engine.clock.now
        for each in news:
            sequence = each[0]
            track = tracks.get(sequence.request.id)
            if track is None:
                continue
            if track.read(now, *each):
                self.engine.stop(sequence)  # its event is no news: the text has ended already
            if not track.wants_tokens:
                self._listeners.pop(track.request.id, None)
            if track.output.finished:
                self._tracks.pop(track.request.id, None)

    def _stream(self, track: Track) -> Iterator[Chunk]:
        try:
            while True:
                if chunks := track.take_chunks():
                    yield from chunks  # meanwhile another stream's steps may bring this one more
                elif track.output.finished:
                    break
                else:
                    self._step()
            if track.error:
                raise RequestError(f"request {track.request.id} failed: {track.error}")
        finally:
            self._leave([track])

    def _leave(self, tracks: list[Track]) -> None:
        """Whatever was not finished when the caller left is ended."""
        for track in tracks:
            if not track.output.finished:
                self._dispatch(self.engine.abort(track.request.id), self._tracks)
                self._tracks.pop(track.request.id, None)
                self._listeners.pop(track.request.id, None)


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Have Python collect only what is young: to look at all that is loaded takes so long that a GPU would idle."""
    usual = gc.get_threshold()
    gc.set_threshold(usual[0], usual[1], 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
