"""LLM: the engine in the caller's process, from text to text."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Literal, TypeVar

from chairlift.cluster.tensor_parallel.build import build
from chairlift.core.errors import ChairliftError, RequestError
from chairlift.core.params import SamplingParams
from chairlift.core.settings import Settings
from chairlift.core.values import one_line
from chairlift.engine.garbage import no_full_collections
from chairlift.execution.build import Built
from chairlift.models.sources import DEFAULT_MODEL
from chairlift.offline.beam_search import BeamSearchOutput, BeamSearchParams, as_beams
from chairlift.offline.driver import Driver
from chairlift.offline.keywords import check_params, either, refuse_unknown
from chairlift.offline.prompts import Message, Prompt, Read, as_list
from chairlift.offline.requests import RequestBuilder
from chairlift.offline.track import Track
from chairlift.text.outputs import Chunk, RequestOutput
from chairlift.text.tokenizer import Tokenizer

__all__ = ["LLM", "Message", "Prompt"]
Params = SamplingParams | Sequence[SamplingParams]
OnError = Literal["raise", "return"]
ReadPrompt = partial[Read]
K = TypeVar("K")
log = logging.getLogger("chairlift")


class LLM:
    """A model and its engine, in this process.

    >>> llm = LLM()                                           # doctest: +SKIP
    >>> llm.generate("The capital of France is")[0].outputs[0].text  # doctest: +SKIP
    ' Paris.'
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, progress: bool = True, **settings: Any) -> None:
        self.settings = Settings.of(**settings)
        self.model = model
        self._progress = progress
        self._built: Built = build(model, self.settings, progress=progress)
        self._end_ranks = weakref.finalize(self, self._built.close)
        self._built.engine.end_input()  # each call has all its requests: a static batch need not wait for more
        self.engine = self._built.engine
        self.config = self._built.config
        self.capacity = self._built.capacity
        self.weight_bytes = self._built.weight_bytes
        self.weights = self._built.weights  # their formats, in words
        self._builder = RequestBuilder(model, self._built, self.settings)
        self._reader = self._builder.prompts
        self.tokenizer = self._builder.tokenizer
        self.defaults = self._builder.defaults
        self._is_closed = False
        self._driver = Driver(self.engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        structured: Any = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        on_error: OnError | None = None,
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Answer prompts (text or token ids), all in one continuous batch, in the order given.

        Without `params`, a prompt is sampled with `get_default_sampling_params()`; given params are used unchanged.
        `sampling_params` and `use_tqdm` are vLLM's names of `params` and `progress`. `structured` says what every
        answer must match, as in SamplingParams: {"json": schema}, {"regex": ...}, or a pydantic class.

        A prompt that cannot be answered, such as one that is too long, has a result with an `error`, and the others are
        answered; if none can be, the first error is raised. `on_error="raise"` raises the first error in any case,
        before any prompt is answered if it is known then; `on_error="return"` raises none.
        """
        refuse_unknown(unknown, is_chat=False)
        read = [partial(self._reader.encode, prompt) for prompt in as_list(prompts)]
        params = self._with(either("params", params, "sampling_params", sampling_params), structured)
        return self._answer(read, params, either("progress", progress, "use_tqdm", use_tqdm), on_error)

    def _with(self, params: Params | None, structured: Any) -> Params | None:
        """Return the params with what every answer must match."""
        if structured is None:
            return params
        check_params(params)
        if isinstance(params, Sequence):
            return [replace(each, structured=structured) for each in params]
        return replace(params or self.get_default_sampling_params(), structured=structured)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        structured: Any = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        on_error: OnError | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, as `generate` does; further keywords are those of `chat_prompt`.

        With `tools`, `tool_choice` and `parallel_tool_calls` as in OpenAI's API, and with models that reason, in
        `max_thinking_tokens` at most, `output.messages` has each answer's content, reasoning and calls.
        """
        refuse_unknown(template, is_chat=True)
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        read = [partial(self._reader.chat, conversation, **template) for conversation in conversations]
        params = self._with(either("params", params, "sampling_params", sampling_params), structured)
        return self._answer(read, params, either("progress", progress, "use_tqdm", use_tqdm), on_error)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool | None = None,  # a stream has no bar
        **unknown: Any,
    ) -> Iterator[Chunk]:
        """Yield the answer to one prompt in chunks; leaving the loop early aborts the request."""
        refuse_unknown(unknown, is_chat=False)
        [params] = self._choose(either("params", params, "sampling_params", sampling_params), 1)
        if params.width > params.n:
            raise RequestError(
                f"best_of is {params.best_of} and n is {params.n}: which answers are the best is known at their end; "
                "use generate(), or leave best_of out"
            )
        return self._stream(self._submit(self._reader.encode(prompt), params, is_streamed=True))

    def _stream(self, track: Track) -> Iterator[Chunk]:
        yield from self._driver.stream(track)
        judge([track.output], None)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool | None = None,
        **template: Any,
    ) -> Iterator[Chunk]:
        """Yield the answer to a conversation in chunks; further keywords are those of `chat_prompt`."""
        return self.stream(self._reader.chat(messages, **template), params, sampling_params=sampling_params)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, **unknown: Any
    ) -> list[BeamSearchOutput]:
        """Return the likeliest answers to each prompt, with the parameters and results of vLLM's method.

        They are those of SamplingParams(use_beam_search=True) and equal those of transformers: a length penalty uses
        the answer's length, where vLLM uses that of prompt and answer.
        """
        refuse_unknown(unknown, is_chat=False)
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params is {params!r}: use BeamSearchParams(beam_width=..., max_tokens=...)")
        outputs = self.generate(prompts, params.sampling(), on_error="raise")
        return [as_beams(output, self.tokenizer) for output in outputs]

    def iterate(
        self, requests: Iterable[tuple[K, Prompt, SamplingParams]], *, window: int | None = None
    ) -> Iterator[tuple[K, RequestOutput | RequestError]]:
        """Answer any number of requests; yield each with its key as soon as it ends, in any order.

        Requests are read from the iterable only while fewer than `window` are live (default: four full batches), so it
        may be endless. A rejected request yields its error and does not affect the others; a request of a failed step
        has the error in its answers.
        """
        self._check_open()
        window = window or 4 * self._built.limits.max_sequences
        source = iter(requests)
        live: list[tuple[K, Track]] = []
        try:
            while (taken := list(islice(source, window - len(live)))) or live:
                for key, prompt, params in taken:
                    try:
                        live.append((key, self._submit(self._reader.encode(prompt), params)))
                    except RequestError as error:
                        yield key, error
                    except ChairliftError:
                        raise  # an error of the engine: no request can be answered
                    except Exception as error:  # a request that passes all checks must still not end the others
                        said = f"{type(error).__name__}: {one_line(error)}"
                        yield key, RequestError(f"the request cannot be read: {said}")
                self._driver.step()
                ended = [entry for entry in live if entry[1].output.finished]
                live = [entry for entry in live if not entry[1].output.finished] if ended else live
                for key, track in ended:
                    yield key, track.output
        finally:
            self._driver.abort_unfinished([track for _, track in live])

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
        """Return the token ids of a conversation, rendered by the model's chat template or by `chat_template`.

        `chat_template_kwargs` has variables of the template, such as {"enable_thinking": False}.
        """
        return self._reader.chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            **unknown,
        ).ids

    def read_chat(self, messages: Sequence[Message], **template: Any) -> Read:
        """Return a conversation as a prompt for `iterate`; the keywords are those of `chat_prompt`, and tools'."""
        return self._reader.chat(messages, **template)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; RequestError, with the reason, if there is none."""
        return self._reader.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the params of prompts without any: the model's recommended values, where it has some."""
        return self._builder.default_params()

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache; return the number of KV blocks dropped."""
        return self.engine.clear_prefix_cache()

    def close(self) -> None:
        """Abort all requests and end the processes of other ranks; later calls are errors."""
        self._is_closed = True
        self._driver.close()
        self._end_ranks()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- requests in

    def _answer(
        self, read: list[ReadPrompt], params: Params | None, progress: bool | None, on_error: OnError | None
    ) -> list[RequestOutput]:
        """Answer prompts; each is tokenized just before it is submitted."""
        if on_error not in (None, "raise", "return"):
            raise RequestError(f"on_error is {on_error!r}: use 'raise' or 'return'")
        choices = self._choose(params, len(read))
        outputs: list[RequestOutput] = []
        tracks: list[Track] = []
        tokens, enough = 0, self._built.limits.step_tokens if self.engine.may_step_while_submitting else math.inf
        with no_full_collections():
            try:
                for each, chosen in zip(read, choices, strict=True):
                    try:
                        tracks.append(self._submit(each(), chosen))
                    except RequestError as error:
                        if on_error == "raise":
                            raise
                        outputs.append(self._refused(each, error))
                        continue
                    outputs.append(tracks[-1].output)
                    tokens += len(tracks[-1].request.prompt)
                    if tokens >= enough:
                        self._driver.step()  # the device runs a full first step while the other prompts are read
                        enough = math.inf
                self._driver.run(tracks, self._progress if progress is None else progress)
            finally:
                self._driver.abort_unfinished(tracks)
        judge(outputs, on_error)
        return outputs

    def _refused(self, read: ReadPrompt, error: RequestError) -> RequestOutput:
        text = read.args[0] if isinstance(read.args[0], str) else None
        return RequestOutput.refused(self._builder.new_id(), text, self.engine.clock.now(), str(error))

    def _choose(self, params: Params | None, count: int) -> list[SamplingParams]:
        """Return the sampling parameters of each of `count` prompts."""
        self._check_open()
        check_params(params)
        choices = (
            list(params) if isinstance(params, Sequence) else [params or self.get_default_sampling_params()] * count
        )
        if len(choices) != count:
            raise RequestError(
                f"there are {count} prompts and {len(choices)} sampling params: give one, or one for each"
            )
        return choices

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("this LLM is closed: make another one, or close it later")

    def _submit(self, read: Read, params: SamplingParams, *, is_streamed: bool = False) -> Track:
        request = self._builder.build(self._builder.new_id(), read, params, self._driver.fail)
        track = self._driver.start(request, read.text, self.tokenizer, is_streamed=is_streamed, form=read.form)
        track.output.thinking = read.thinking
        return track


def judge(outputs: list[RequestOutput], on_error: OnError | None) -> None:
    """Raise the first error if `on_error` is "raise" or no prompt has an answer; else log how many have none."""
    failed = [place for place, output in enumerate(outputs) if output.error]
    if not failed or on_error == "return":
        return
    first = f"prompt {failed[0]}: " if len(outputs) > 1 else ""
    first += str(outputs[failed[0]].error)
    if on_error == "raise" or len(failed) == len(outputs):
        raise RequestError(first)
    log.warning("%d of %d prompts have an error in place of an answer; %s", len(failed), len(outputs), first)
