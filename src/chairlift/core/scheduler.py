"""The iteration-level scheduler: before every forward pass it chooses which tokens of which sequences to compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice, repeat

from chairlift.core.batch import RunningBatch
from chairlift.core.batching import Continuous, Gate
from chairlift.core.beams import Beams
from chairlift.core.blocks import BlockPool
from chairlift.core.budget import Budget, FixedBudget, work_of
from chairlift.core.cache_groups import CacheGroups
from chairlift.core.constraint import Masker, Masks
from chairlift.core.cost import Cost
from chairlift.core.counters import Counters
from chairlift.core.errors import RequestError, SettingsError
from chairlift.core.limits import Limits
from chairlift.core.masking import masks_of
from chairlift.core.memory import Memory
from chairlift.core.plan import Event, Outcome, StepPlan
from chairlift.core.planner import Planner
from chairlift.core.policy import Policy
from chairlift.core.predictor import PREDICTORS, Predictor
from chairlift.core.preemption import Preemption
from chairlift.core.prefill import Chunked, PrefillMode
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.queue import WaitingQueue
from chairlift.core.request import FinishReason, Phase, Request, Sequence
from chairlift.core.step import Candidates, StepResult, TokenLogprobs

_FINISHED = (FinishReason.STOP, FinishReason.COMPLETE, FinishReason.LENGTH)


class Scheduler:
    """Owns every request from `submit` to its last event, and the blocks of its sequences."""

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        *,
        policy: Policy | None = None,
        gate: Gate | None = None,
        prefill: PrefillMode | None = None,
        preemption: Preemption | None = None,
        prefix_cache: PrefixCache | None = None,
        predictor: Predictor | None = None,
        budget: Budget | None = None,
        cost: Cost | None = None,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        groups = CacheGroups(windows, pool.block_size, limits.step_tokens)
        if pool.total < groups.blocks_of(limits.max_length):
            # One sequence alone must always be able to finish: that is what makes preemption end.
            raise SettingsError(
                f"the KV cache has {pool.total} blocks, and one sequence of max_length {limits.max_length} tokens "
                f"needs {groups.blocks_of(limits.max_length)}: lower max_length or give the cache more memory"
            )
        self.limits = limits
        self.pool = pool
        self.policy: Policy = policy or Policy()
        self.memory = Memory(pool, preemption, prefix_cache, groups)
        self.predictor: Predictor = predictor or PREDICTORS["max_tokens"](limits.max_length)
        self.waiting = WaitingQueue(self.policy)
        self.counters = Counters()
        self.admission = self.memory.admission
        self._cost = cost  # the cost model to update with step times, if a part of the scheduler uses it
        self._live: dict[str, list[Sequence]] = {}  # each request's sequences that have not ended
        self.policy.cached = self.admission.known
        self.policy.peek_cached = lambda each: self.admission.known(each, self.memory.prefixes.look_up(each))
        self.batch = RunningBatch(limits.max_sequences, self.memory, self.policy, self.waiting, self.counters)
        self.running = self.memory.prefixes.running = self.batch.running
        self.planner = Planner(
            limits,
            self.memory,
            self.batch,
            self.waiting,
            self.policy,
            gate or Continuous(),
            prefill or Chunked(limits, Cost()),
            budget or FixedBudget(),
            self._add_sibling,
        )
        self._is_trusted = True
        self._moved: list[Sequence] = []  # beams that continue another one: the executor gets their new tokens
        self._constrained = 0  # live requests with a constraint
        self.masker = Masker()

    # ---- requests in and out

    def submit(self, request: Request) -> None:
        """Queue a request, or refuse it with a RequestError."""
        order = self.counters.submitted
        self.counters.submitted += 1
        try:
            if request.id in self._live:
                raise RequestError(f"request id {request.id!r} is in use: choose another or wait until it has ended")
            self.limits.check(request)
            limit = self.limits.max_tokens_of(request)
            self.admission.check_beams(request, limit)
        except RequestError:
            self.counters.rejected += 1
            raise
        sequence = Sequence(request, order, limit, groups=len(self.memory.groups.windows))
        if request.params.use_beam_search:
            sequence.group = Beams(sequence, limit)
        if self.policy.needs_lengths:
            sequence.expected = self.predictor.predict(request)
        self._live[request.id] = [sequence]
        self._constrained += request.constraint is not None
        self.policy.arrived(sequence)
        sequence.rank = (self.policy.key(sequence), order, 0)
        self.waiting.push(sequence, request.arrival)

    def _add_sibling(self, sibling: Sequence) -> None:
        self._live[sibling.request.id].append(sibling)
        self.policy.arrived(sibling)

    def abort(self, request_id: str, error: str | None = None) -> list[Event]:
        """End a request now, as failed if there is an error; its blocks are free when this returns.

        An unknown id is no error.
        """
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        return self._end(self._live.get(request_id, ()), reason, error)

    def stop(self, sequence: Sequence) -> list[Event]:
        """End one sequence as stopped: a front has found a stop string in its text."""
        return self._end([sequence], FinishReason.STOP)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or blocks have arrived for the pool."""
        return bool(self._live or self.memory.prefixes.exchange.arrived)

    @property
    def serves_in_order(self) -> bool:
        """Whether waiting requests are admitted in order of arrival, as soon as there is room."""
        return self.policy.is_in_order and not self.planner.gate.closes

    def is_live(self, request_id: str) -> bool:
        """Whether a request has not ended."""
        return request_id in self._live

    def find(self, request_id: str, index: int) -> Sequence | None:
        """Return a sequence of a request, if it has not ended."""
        return next((each for each in self._live.get(request_id, ()) if each.index == index), None)

    # ---- one step

    def plan(self, now: float) -> StepPlan:
        """Choose the slices of one forward pass."""
        step = self.planner.plan(now, self._moved)
        self._moved = []
        self.memory.finish(step)
        step.number()
        if self._constrained:
            step.masked = [place for place, each in enumerate(step.samples) if each.constraint is not None]
        return step

    def masks(self, step: StepPlan) -> tuple[Masks, list[Event]]:
        """Return the masks of a step's constrained samples, once the tokens before them are known.

        Constraints that fail end their requests: the events say so.
        """
        found, failures = masks_of(step, self.masker)
        events: list[Event] = []
        for sequence, error in failures:
            if not sequence.is_done:
                events += self._fail_constraint(sequence, error)
        return found, events

    def pause(self, now: float) -> float:
        """Return the seconds for which no step can run: the batch is empty, and the gate waits for more requests."""
        return self.planner.pause(now)

    def stuck(self, now: float) -> Sequence:
        """Return the sequence to end when plans stay empty though there are requests and no step is in flight.

        The last running one: the others lack what it holds. If none runs, the first waiting one, which blocks the rest.
        """
        return self.running[-1] if self.running else self.waiting.peek(now) or next(iter(self.waiting))

    def observe(self, step: StepPlan, seconds: float) -> None:
        """Update the cost model with the time of a step."""
        if not step.sequences:
            return  # it only copied blocks that had arrived
        if self._cost is not None:
            self._cost.learn(work_of(step), seconds)
        if self.planner.speculation is not None:
            self.planner.speculation.observe_step(step, seconds)

    def collects_early(self, step: StepPlan) -> bool:
        """Whether to collect this step, which is in flight, before the next is planned: that one may check drafts."""
        speculation = self.planner.speculation
        return speculation is not None and speculation.collects_early(bool(step.drafts), self.running)

    def observe_early(self, step: StepPlan, seconds: float) -> None:
        """Learn how long the device waited for a step that was planned after the one before was collected."""
        if self.planner.speculation is not None:
            self.planner.speculation.observe_early(step, seconds)

    def apply(self, step: StepPlan, result: StepResult) -> Outcome:
        """Append the tokens of a step, end the sequences that are complete and free their blocks at once."""
        counts = result.counts
        assert len(step.samples) == len(result.tokens if counts is None else counts), (
            "one token or count for each sample"
        )
        events = [
            Event(step.sequences[place], prompt_logprobs=scores)
            for place, scores in result.prompt_logprobs or ()
            if step.sequences[place].phase is not Phase.DONE
        ]
        self.memory.confirm(step)
        self.memory.prefixes.has_new_tokens = True
        for sequence in (step.samples[place] for place in result.failed):
            if sequence.phase is not Phase.DONE:
                request = sequence.request
                error = request.no_token_error
                events += self._end(self._live[request.id], FinishReason.ERROR, error, bool(request.rules))
        if counts is not None:
            return self._apply_drafts(step, result, counts, events)
        if step.masked:
            self._advance(step, result.tokens)
        odd: set[Sequence] = set()  # of which there is other news than a token
        is_scored = result.logprobs is not None
        for sequence, token, scored in zip(step.samples, result.tokens, result.logprobs or repeat(None), strict=False):
            known = sequence.tokens
            if len(known) < sequence.plain_until and token not in sequence.stop_ids and not is_scored:
                known.append(token)  # nothing else to do, as for nearly every token
                continue
            news = self._take(sequence, token, scored)
            if news is not None:
                odd.add(sequence)
                events += news
        if not odd:
            return Outcome(step.samples, result.tokens, events)
        usual = [pair for pair in zip(step.samples, result.tokens, strict=True) if pair[0] not in odd]
        return _in_order(Outcome([sequence for sequence, _ in usual], [token for _, token in usual], events))

    def _advance(self, step: StepPlan, tokens: list[int]) -> None:
        """Advance the constraints of a step's samples together."""
        constraints, own = [], []
        for place in step.masked:
            sequence = step.samples[place]
            if sequence.constraint is not None and sequence.phase is not Phase.DONE:
                constraints.append(sequence.constraint)
                own.append(tokens[place])
        self.masker.accept(constraints, own)

    def _apply_drafts(self, step: StepPlan, result: StepResult, counts: list[int], events: list[Event]) -> Outcome:
        """Append the tokens of a step that checked drafts, for each sample those accepted and one more."""
        outcome = Outcome(events=events)
        tokens = zip(result.tokens, result.logprobs or repeat(None), strict=False)
        for sequence, count in zip(step.samples, counts, strict=True):
            taken = list(islice(tokens, count))
            if sequence.is_done:
                continue
            token, scored = taken[0]
            if count == 1 and scored is None and not sequence.unchecked:  # a plain decode
                news = self._take(sequence, token, None)
                if news is None:
                    outcome.sequences.append(sequence)
                    outcome.tokens.append(token)
                else:
                    events += news
                continue
            if sequence.unchecked:
                assert self.planner.speculation is not None
                self.planner.speculation.observe(sequence, sequence.unchecked, count - 1)
                sequence.rewind(sequence.unchecked + 1 - count)
                sequence.unchecked = 0
            own = self._take_all(sequence, taken)
            if any(event.finish_reason or event.logprobs for event in own) or len(own) < count:
                events += own
            else:
                outcome.sequences += repeat(sequence, count)
                outcome.tokens += (token for token, _ in taken)
        return _in_order(outcome)

    def _take_all(self, sequence: Sequence, tokens: list[tuple[int, TokenLogprobs | Candidates | None]]) -> list[Event]:
        """Append several tokens; those behind a stop token are dropped. An event for each."""
        found: list[Event] = []
        for token, scored in tokens:
            news = self._take(sequence, token, scored)
            found += [Event(sequence, token)] if news is None else news
            if sequence.is_done:
                break
        return found

    def _take(self, sequence: Sequence, token: int, scored: TokenLogprobs | Candidates | None) -> list[Event] | None:
        """Append a token and end the sequence if it is complete; return events if there is more news than the token."""
        if sequence.phase is Phase.DONE:
            return []  # it ended while this step was in flight
        if isinstance(scored, Candidates):
            return self._search(sequence, scored)
        if sequence.constraint is not None:
            try:
                sequence.constraint.accept(token)
            except Exception as error:
                return self._fail_constraint(sequence, error)
        sequence.tokens.append(token)
        reason = None
        if token in sequence.stop_ids:
            reason = FinishReason.STOP
        elif sequence.constraint is not None and sequence.constraint.is_complete:
            reason = FinishReason.COMPLETE
        elif len(sequence.tokens) >= sequence.limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._retire([sequence], reason)
        return None if reason is None and scored is None else [Event(sequence, token, reason, scored)]

    def _fail_constraint(self, sequence: Sequence, error: Exception) -> list[Event]:
        """End the request of a constraint that raised."""
        is_known = isinstance(error, RequestError)
        message = str(error) if is_known else f"the constraint on the answer failed: {type(error).__name__}: {error}"
        return self._end(self._live[sequence.request.id], FinishReason.ERROR, message, is_known)

    def fail(self, step: StepPlan, error: str) -> list[Event]:
        """End every request of a failed step, and every request that depends on what the step should have written."""
        shared = self.memory.disown(step, self.running)
        sequences = step.sequences + step.samples + step.placed + shared
        requests = (sequence.request.id for sequence in sequences if sequence.phase is not Phase.DONE)
        events: list[Event] = []
        for request_id in list(dict.fromkeys(requests)):  # in the plan's order, so that a simulation repeats itself
            events += self._end(self._live[request_id], FinishReason.ERROR, error)
        return events

    def check(self) -> None:
        """Check the invariants: blocks, rows, tokens in flight and requests are all accounted for."""
        live = [sequence for sequences in self._live.values() for sequence in sequences]
        waiting = [sequence for sequence in live if sequence.phase is Phase.WAITING]
        running = [sequence for sequence in live if sequence.phase is Phase.RUNNING]
        assert len(waiting) == len(self.waiting) == sum(1 for _ in self.waiting)
        self.batch.check(running)
        self.memory.check(running, waiting)
        samples = Counter(each for step in self.memory.prefixes.in_flight for each in step.samples)
        for sequence in live:
            if not sequence.is_search:
                assert sequence.in_flight == samples[sequence] + sequence.unchecked
            else:  # candidates in flight are dropped when beams are preempted, and wait for those of other beams
                assert 0 <= sequence.in_flight <= 1
            assert sequence.computed < sequence.length <= sequence.limit
        c = self.counters
        assert c.submitted == len(self._live) + c.finished + c.aborted + c.rejected + c.failed

    # ---- beams

    def _search(self, sequence: Sequence, candidates: Candidates) -> list[Event]:
        """Take a beam's candidates; with the last beam's, choose those to continue, or end the search."""
        beams = sequence.group
        assert isinstance(beams, Beams), "only beams have candidates"
        if sequence.phase is not Phase.RUNNING or not beams.add_candidates(sequence, candidates):
            return []
        going = beams.choose()
        staying, leaving = beams.members[: len(going)], beams.members[len(going) :]
        if going:
            self.memory.follow(going, staying)
            self._moved += staying
            beams.members = staying
        events = [] if going else beams.answers()
        self._retire(leaving, events[-1].finish_reason if events else FinishReason.STOP)
        return events

    # ---- ending

    def _end(
        self,
        sequences: Iterable[Sequence],
        reason: FinishReason,
        error: str | None = None,
        is_request_error: bool = False,
    ) -> list[Event]:
        ending = [sequence for sequence in sequences if sequence.phase is not Phase.DONE]
        self._retire(ending, reason)
        return [
            Event(sequence, finish_reason=reason, error=error, is_request_error=is_request_error) for sequence in ending
        ]

    def _retire(self, sequences: list[Sequence], reason: FinishReason | None) -> None:
        """Free all that the sequences hold, and count each request as ended with its last sequence."""
        counters = self.counters
        for sequence in sequences:
            self.memory.end(sequence)
            sequence.plain_until = 0
            if sequence.phase is Phase.RUNNING:
                self.batch.remove(sequence)
                sequence.phase = Phase.DONE
            else:
                sequence.phase = Phase.DONE
                self.waiting.forget(1)
            self.policy.ended(sequence)
            if self.planner.speculation is not None:
                self.planner.speculation.ended(sequence)
            if self.policy.needs_lengths and reason in _FINISHED:
                self._learn_length(sequence)
            live = self._live[sequence.request.id]
            live.remove(sequence)
            if live:
                continue
            del self._live[sequence.request.id]
            self._constrained -= sequence.request.constraint is not None
            if reason is FinishReason.ABORT:
                counters.aborted += 1
            elif reason is FinishReason.ERROR:
                counters.failed += 1
            else:
                counters.finished += 1

    def _learn_length(self, sequence: Sequence) -> None:
        self.predictor.learn(sequence.request, len(sequence.tokens) - sequence.prompt_length)
        if self.predictor.is_trusted != self._is_trusted:
            self._is_trusted = self.predictor.is_trusted
            self.waiting.rekey()


def _in_order(outcome: Outcome) -> Outcome:
    """Put tokens of sequences that a sibling's failed constraint has ended before the events that report it."""
    pairs = list(zip(outcome.sequences, outcome.tokens, strict=True))
    if any(sequence.is_done for sequence, _ in pairs):
        outcome.events[:0] = [Event(*pair) for pair in pairs if pair[0].is_done]
        kept = [pair for pair in pairs if not pair[0].is_done]
        outcome.sequences, outcome.tokens = [sequence for sequence, _ in kept], [token for _, token in kept]
    return outcome
