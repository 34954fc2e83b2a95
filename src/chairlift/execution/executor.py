"""The torch executor: runs a step as one forward pass over its flat batch and returns one token per sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch

from chairlift.core.errors import DeviceError
from chairlift.core.limits import Limits
from chairlift.core.step import Bits, Candidates, PromptLogprobs, Step, StepResult, TokenLogprobs
from chairlift.execution.checks import Checks, checks_of, samples_of
from chairlift.execution.crowding import crowding_of_process
from chairlift.execution.drafts import DeviceDrafts, flat_of
from chairlift.execution.exchange import BlockExchange
from chairlift.execution.graphs import STAGING_BUFFERS, Capturer, DecodeGraphs
from chairlift.execution.joint_sampling import FollowingSampler, LeadingSampler
from chairlift.execution.mixed_graphs import MixedGraphs
from chairlift.execution.rows import Flat, Rows
from chairlift.execution.sampler import Sampler
from chairlift.execution.scores import BeamCandidates, Scores, Scoring, score_tokens
from chairlift.execution.sharing import Grouping
from chairlift.execution.swap import HostBlocks
from chairlift.models.decoder import Decoder
from chairlift.ops.batch import to_device
from chairlift.ops.filters import NO_TOKEN
from chairlift.ops.kv_cache import KvCache
from chairlift.ops.masks import pack_masks
from chairlift.ops.triton_found import HAS_TRITON

_SCORED_ROWS = 256  # prompt tokens scored at once: their logits over the whole vocabulary are in memory together


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step in flight, for `collect` to wait for."""

    tokens: np.ndarray
    done: torch.Event | None
    scores: list[tuple[list[int], Scores | BeamCandidates]]  # with the numbers of the scored samples
    prompt_scores: list[PromptScores]
    checks: Checks | None = None  # if the step checks drafts
    drafted: np.ndarray | None = None  # the drafts, if a draft model chose them
    masked: Masked | None = None  # completed by `choose`


class Masked(NamedTuple):
    """The constrained tokens to sample of a step, before `choose` has chosen them."""

    places: np.ndarray  # numbers of these tokens
    own_logits: torch.Tensor  # to choose them from, before penalties and temperature
    tokens: torch.Tensor | None  # of all samples of the step; None if all are constrained
    rows: np.ndarray
    positions: np.ndarray
    scored: np.ndarray  # numbers of the samples to score, and their logits
    scored_logits: torch.Tensor | None
    unread: Unread | None


class Unread(NamedTuple):
    """A step with hidden states that a draft head reads as soon as its tokens are sampled."""

    flat: Flat
    rows: np.ndarray  # of the sampled tokens
    at: np.ndarray  # places in the flat batch of the tokens before them


class PromptScores(NamedTuple):
    """Log-probabilities of consecutive tokens of one prompt."""

    slice: int  # number of the slice that computed them
    start: int  # position of the first token
    scores: Scores


class Decodes(NamedTuple):
    """A step of decodes alone, as arrays, and the sampling of their rows."""

    listed: list[int]  # the rows as a list, as in the step
    rows: np.ndarray
    starts: np.ndarray
    is_greedy: bool
    scored: np.ndarray  # numbers of the samples with log-probabilities


class TorchExecutor:
    """Runs steps on one device. `launch` may return before the device is done; `collect` waits."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        limits: Limits,
        host: HostBlocks | None = None,
        *,
        shared_reads: bool = False,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._host = host
        self._device = decoder.device
        grouping = self._group() if shared_reads else None
        groups, size = len(decoder.layout.windows), cache.block_size
        self.rows = self._rows = Rows(limits.max_sequences, limits.max_length, size, self._device, grouping, groups)
        group = decoder.group
        self._chooses = group is None or group.rank == 0
        self.sampler = Sampler(limits.max_sequences, self._rows.tokens, limits.vocab_size)
        self._sampler: Sampler | LeadingSampler | FollowingSampler = self.sampler
        if group is not None:
            follows = group.rank > 0
            self._sampler = FollowingSampler(self._rows, group) if follows else LeadingSampler(self.sampler, group)
        self._scoring = Scoring(limits.max_sequences, self._device)
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._limits = limits
        self._decodes: Decodes | None = None  # the last step, if it had decodes alone
        self._events: list[torch.Event] = []  # completed events, for reuse
        self._is_cuda = self._device.type == "cuda"
        # Only with our own kernels: their results do not depend on the number of threads; torch's may.
        is_compiled = self._device.type == "cpu" and decoder.config.dtype == torch.float32
        self._crowding = crowding_of_process() if is_compiled else None
        self._threads = 0  # of the last step
        # Buffers for sampled tokens, used in rotation: one is read long before it is written again.
        places = [
            torch.empty(limits.max_samples, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(STAGING_BUFFERS)
        ]
        self._arrivals = cycle([(place, place.numpy()) for place in places])
        self.exchange: BlockExchange | None = None  # for blocks from and to other processes
        self.drafts: DeviceDrafts | None = None  # the drafter of drafts that steps leave to the executor (UNKNOWN)
        self._coin: np.random.Generator | None = None
        self._chance = 0.0

    @property
    def _states(self) -> torch.Tensor | None:
        """Where every pass writes the hidden states that a draft head reads; None: there is no head."""
        return None if self.drafts is None else self.drafts.states

    def accept_by_chance(self, chance: float) -> None:
        """Accept drafts with this probability, whatever the model says: to measure speed with random weights."""
        self._coin, self._chance = np.random.default_rng(0), chance

    @torch.inference_mode()
    def use_graphs(self, scratch_block: int) -> None:
        """Capture steps as CUDA graphs and replay them; `scratch_block` is a block outside the pool."""
        limits = self._limits
        self._rows.keep_tables_on_device(scratch_block)
        capturer = Capturer(
            self._decoder, self._cache, self._rows, limits.max_sequences, limits.step_drafts, self._states
        )
        self._graphs, self._mixed = DecodeGraphs(capturer), MixedGraphs(capturer, limits.step_tokens)
        self._mixed.capture()
        self._graphs.capture()
        if self.drafts is not None:
            self.drafts.use_graphs()

    @property
    def captures(self) -> bool:
        """Whether steps are captured as CUDA graphs."""
        return self._graphs is not None

    @torch.inference_mode()
    def seconds_of_decodes(self, size: int) -> float:
        """Time a captured step of so many decodes, on scratch rows."""
        assert self._graphs is not None, "steps are not captured"
        return self._graphs.seconds(size)

    def launch(self, step: Step) -> LaunchedStep:
        """Start one forward pass."""
        try:
            return self._start(step)
        except torch.AcceleratorError as error:  # running out of memory is another error
            raise DeviceError(str(error)) from error

    @torch.inference_mode()
    def _start(self, step: Step) -> LaunchedStep:
        if self._crowding is not None:
            self._crowding.look()
            if self._crowding.threads != self._threads:
                self._threads = self._crowding.threads
                self._crowding.apply()
        if step.sent:
            assert self.exchange is not None, "a step that sends blocks needs slots"
            self.exchange.send(step.sent)
        if step.saved or step.restored or step.spilled or step.loaded:
            assert self._host is not None, "a step that swaps needs host memory"
            self._host.move(step)
        elif step.copies:
            self._cache.copy(step.copies)
        if step.received:
            assert self.exchange is not None, "a step that receives blocks needs slots"
            self.exchange.receive(step.received)
        if self.drafts is not None:
            self.drafts.copy(step)
        self._rows.update(step)
        for newcomer in step.newcomers:
            self._sampler.place(newcomer)
            if self.drafts is not None:
                self.drafts.place(newcomer)
            self._scoring.place(newcomer)
        if not step.rows:  # it only moves blocks
            self._decodes = None
            return LaunchedStep(np.empty(0, np.int64), self._record(), [], [])
        prompt_scores: list[PromptScores] = []
        checks: Checks | None = None
        drafted: np.ndarray | None = None
        places = np.array(step.masked, np.int64)
        reads = self._states is not None
        self._decodes = self._find_decodes(step)
        if self._decodes is not None and self._graphs is not None:
            _, rows, starts, is_greedy, scored = self._decodes
            positions = starts + 1
            logits, tokens = self._graphs.run(rows, starts, self._rows.find_shared(rows, positions), is_greedy)
            unread = Unread(flat_of(rows, starts, np.ones_like(rows)), rows, np.arange(rows.size)) if reads else None
        else:
            # Scores of prompts are found by the number of their slice.
            is_split = self._is_cuda and bool(step.drafts) and not self._scoring.reads_prompts(np.array(step.rows))
            flat, samples = Flat.of(step, checks_as_decodes=is_split), samples_of(step)
            if step.drafts:
                samples, checks = checks_of(step)
                places = np.flatnonzero(np.isin(samples.number, places))
            rows, positions = samples.rows, flat.positions[samples.at] + 1  # of the sampled tokens
            unread = Unread(flat, rows, samples.at) if reads else None
            if checks is not None:
                drafted = self._write_drafts(step, checks, positions[checks.places])
            logits, tokens, prompt_scores = self._read(flat, samples.at, rows, positions)
            if not rows.size:
                self._read_states(unread)
                return LaunchedStep(np.empty(0, np.int64), self._record(), [], prompt_scores)
            scored = self._scoring.find(rows)
        # Copies of the raw logits: the sampler changes logits by penalties and temperature.
        raw = logits[self._to_device(scored)] if scored.size else None
        own = None if not places.size else logits if places.size == rows.size else logits[self._to_device(places)]
        if tokens is None and places.size < rows.size:
            if checks is None or not places.size:
                tokens = self._sampler.sample(logits, rows, positions)
            else:  # keep a masked sample's drafts in its row: penalties and rules of later samples read them
                free = np.setdiff1d(np.arange(rows.size), places)
                index = self._to_device(free)
                chosen = self._sampler.sample(logits[index], rows[free], positions[free])
                tokens = chosen.new_zeros(rows.size).index_copy_(0, index, chosen)
        if own is not None:
            masked = Masked(places, own, tokens, rows, positions, scored, raw, unread)
            return LaunchedStep(np.empty(0, np.int64), None, [], prompt_scores, checks, drafted, masked)
        assert tokens is not None
        self._read_states(unread)
        scores = [] if raw is None else self._score(raw, tokens, rows, scored)
        return LaunchedStep(self._to_host(tokens), self._record(), scores, prompt_scores, checks, drafted)

    def _write_drafts(self, step: Step, checks: Checks, positions: np.ndarray) -> np.ndarray | None:
        """Write a step's drafts to their rows and positions; return those that the draft model chose."""
        if self.drafts is None:
            self._rows.put_at(*to_device(self._device, checks.rows, positions, checks.wanted[checks.places]))
            return None
        counts = np.array([len(tokens) for _, tokens in step.drafts])
        firsts = np.cumsum(counts) - counts
        self.drafts.draft(checks.rows[firsts], positions[firsts] - 1, counts)
        where, at = to_device(self._device, checks.rows, positions)
        return self._to_host(self._rows.tokens[where.long(), at.long()].long())

    def _read_states(self, step: Unread | None) -> None:
        if step is not None and self.drafts is not None:
            self.drafts.read(*step)

    def choose(self, launched: LaunchedStep, masks: list[Bits | None]) -> None:
        """Choose the tokens of a step's masked samples; they replace the tokens that `launch` chose without a mask."""
        try:
            self._choose(launched, masks)
        except torch.AcceleratorError as error:
            raise DeviceError(str(error)) from error

    @torch.inference_mode()
    def _choose(self, launched: LaunchedStep, masks: list[Bits | None]) -> None:
        assert launched.masked is not None, "no sample of this step waits for a mask"
        places, logits, tokens, rows, positions, scored, raw, unread = launched.masked
        launched.masked = None
        packed = pack_masks(masks, logits.shape[1], pin=self._is_cuda)
        packed = packed.to(self._device, non_blocking=True)
        if places.size == rows.size:
            tokens = self._sampler.sample(logits, rows, positions, packed)
        else:
            assert tokens is not None
            chosen = self._sampler.sample(logits, rows[places], positions[places], packed)
            tokens = tokens.index_copy(0, self._to_device(places), chosen.to(tokens.dtype))
        self._read_states(unread)
        launched.scores = [] if raw is None else self._score(raw, tokens, rows, scored)
        launched.tokens, launched.done = self._to_host(tokens), self._record()

    def _score(
        self, raw: torch.Tensor, tokens: torch.Tensor, rows: np.ndarray, scored: np.ndarray
    ) -> list[tuple[list[int], Scores | BeamCandidates]]:
        return self._scoring.score(raw, tokens[self._to_device(scored)], rows[scored], scored)

    def _find_decodes(self, step: Step) -> Decodes | None:
        """Return a step's decodes if it has nothing else: no prompts, forks or prompt log-probabilities.

        With the rows of the previous step, only the positions change, by one.
        """
        last = self._decodes
        if step.tokens != len(step.rows) or step.sample_rows != step.rows:
            return None
        if last is not None and not step.newcomers and step.rows == last.listed:
            listed, rows, starts, is_greedy, scored = last
            return Decodes(listed, rows, starts + 1, is_greedy, scored)
        rows = np.array(step.rows)
        if self._scoring.reads_prompts(rows):
            return None
        starts = np.array(step.starts)
        return Decodes(step.rows, rows, starts, self._sampler.is_greedy(rows), self._scoring.find(rows))

    def _group(self) -> Grouping | None:
        """Return the grouping of decodes by shared prefix, on a GPU without sliding windows; else None."""
        config, cache = self._decoder.config, self._cache
        if self._device.type != "cuda" or not HAS_TRITON or any(spec.window for spec in self._decoder.specs):
            return None
        from chairlift.ops.decode_cuda import members_of_item

        members = members_of_item(config.heads, cache.kv_heads)
        return Grouping(cache.block_size, cache.kv_heads, members) if members else None

    def _read(
        self, flat: Flat, wanted: np.ndarray, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[PromptScores]]:
        """Run a step with prompts; return the logits of the `wanted` tokens of the flat batch and the prompts' scores.

        If all rows are greedy and the step is captured, also their tokens, written to these rows and positions.
        """
        is_scored = self._scoring.reads_prompts(flat.rows)
        if self._graphs is not None and not is_scored and is_all(flat, wanted):
            shared = self._rows.find_shared(flat.rows, flat.contexts)
            logits, tokens = self._graphs.run(flat.rows, flat.positions, shared, self._sampler.is_greedy(rows))
            return logits, tokens, []
        self._rows.flush_changes()
        size = None if self._mixed is None or is_scored else self._mixed.size_for(flat, wanted.size)
        if self._mixed is not None and size is not None:
            shared = self._rows.find_shared(flat.rows[: flat.decodes], flat.contexts[: flat.decodes])
            logits, tokens = self._mixed.run(size, flat, shared, wanted, rows, positions)
            return logits, tokens if self._sampler.is_greedy(rows) else None, []
        inputs, batch = self._rows.gather(flat)
        asked = None if is_scored else self._decoder.select(batch, wanted)
        states = None if self._states is None else self._states[: flat.positions.size]
        hidden = self._decoder.forward(inputs, batch, self._cache, asked, states)
        scores = self._score_prompts(flat, hidden) if is_scored else []
        if is_scored:
            hidden = hidden[self._to_device(wanted)]
        return self._decoder.logits(hidden) if wanted.size else hidden, None, scores

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for a step and return its results."""
        assert launched.masked is None, "samples of this step wait for their masks"
        if launched.done is not None:
            try:
                launched.done.synchronize()
            except torch.AcceleratorError as error:
                raise DeviceError(str(error)) from error
            self._events.append(launched.done)
        tokens = launched.tokens.tolist()
        logprobs: list[TokenLogprobs | Candidates | None] | None = [None] * len(tokens) if launched.scores else None
        for places, scores in launched.scores:
            assert logprobs is not None
            entries: Iterable[TokenLogprobs | Candidates] = scores.entries()
            for place, entry in zip(places, entries, strict=True):
                logprobs[place] = entry
        prompts = [(place, PromptLogprobs(start, scores.entries())) for place, start, scores in launched.prompt_scores]
        counts = None
        if launched.checks is not None:
            if launched.drafted is not None:
                launched.checks.wanted[launched.checks.places] = launched.drafted
            kept, counts = launched.checks.accepted(tokens, self._coin, self._chance)
            tokens = [tokens[place] for place in kept]
            logprobs = logprobs and [logprobs[place] for place in kept]
        failed: list[int] = []
        if NO_TOKEN in tokens:
            numbers = range(len(tokens)) if counts is None else np.repeat(np.arange(len(counts)), counts).tolist()
            failed = [number for number, token in zip(numbers, tokens, strict=True) if token == NO_TOKEN]
        return StepResult(tokens, logprobs, prompts or None, failed, counts)

    def _score_prompts(self, flat: Flat, hidden: torch.Tensor) -> list[PromptScores]:
        """Return the log-probabilities of prompt tokens, each predicted by the token before it."""
        found = []
        for place, (row, offset, end) in enumerate(zip(flat.rows, flat.starts, flat.contexts, strict=False)):
            asked, prompt_length = self._scoring.prompt_of(row)
            start, last = int(flat.positions[offset]), min(int(end), prompt_length - 1)
            for first in range(start, last, _SCORED_ROWS) if asked >= 0 else ():
                stop = min(first + _SCORED_ROWS, last)
                logits = self._decoder.logits(hidden[offset + first - start : offset + stop - start])
                if not self._chooses:
                    continue
                targets = self._rows.tokens[row, first + 1 : stop + 1].clone()
                scores = score_tokens(logits, targets, [asked] * (stop - first))
                found.append(PromptScores(place, first + 1, scores))
        return found

    def _to_device(self, indices: np.ndarray) -> torch.Tensor:
        """Copy indices to the device; `torch.tensor` would wait for its queued work."""
        return torch.from_numpy(indices).to(self._device, non_blocking=True)

    def _to_host(self, tokens: torch.Tensor) -> np.ndarray:
        """Start the copy of tokens to host memory; return the array that they are copied to."""
        place, array = next(self._arrivals)
        count = tokens.shape[0]
        (place if count == place.shape[0] else place[:count]).copy_(tokens, non_blocking=True)
        return array[:count]

    def _record(self) -> torch.Event | None:
        """Return an event that completes with all work submitted so far."""
        if not self._is_cuda:
            return None
        event = self._events.pop() if self._events else torch.Event(self._device)
        event.record()  # torch.cuda.Event would first look up the stream, in Python
        return event


def is_all(flat: Flat, wanted: np.ndarray) -> bool:
    """Whether a batch has slices of a single token alone, each with a sample: decodes, or checks laid out as such."""
    return flat.is_decodes and np.array_equal(wanted, np.arange(flat.rows.size))
