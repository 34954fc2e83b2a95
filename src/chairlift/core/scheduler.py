"""The iteration-level scheduler: before every forward pass it chooses which tokens of which sequences to compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice, repeat

from chairlift.core.batch import RunningBatch
from chairlift.core.batching import Continuous, Gate, GateView
from chairlift.core.beams import Beams
from chairlift.core.blocks import BlockPool
from chairlift.core.budget import Budget, FixedBudget, work_of
from chairlift.core.cost import Cost
from chairlift.core.counters import Counters
from chairlift.core.errors import RequestError, SettingsError
from chairlift.core.limits import Limits
from chairlift.core.memory import Memory
from chairlift.core.plan import Event, Outcome, StepPlan
from chairlift.core.policy import Policy
from chairlift.core.predictor import PREDICTORS, Predictor
from chairlift.core.preemption import Preemption
from chairlift.core.prefill import Chunked, PrefillMode
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.queue import WaitingQueue
from chairlift.core.request import FinishReason, Phase, Request, Sequence
from chairlift.core.step import Candidates, StepResult, TokenLogprobs

_REKEY = 8  # plans after which the queue is sorted again for a policy that reads the prefix cache; more when it is long


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
        window: int = 0,
    ) -> None:
        if pool.total * pool.block_size < limits.max_length:
            # One sequence alone must always be able to finish: that is what makes preemption end.
            raise SettingsError(
                f"the KV cache holds {pool.total * pool.block_size} tokens, less than one sequence of max_length "
                f"{limits.max_length}: lower max_length or give the cache more memory"
            )
        self.limits = limits
        self.pool = pool
        self.policy: Policy = policy or Policy()
        self.gate: Gate = gate or Continuous()
        self.prefill: PrefillMode = prefill or Chunked(limits, Cost())
        self.memory = Memory(pool, preemption, prefix_cache, window)
        self.predictor: Predictor = predictor or PREDICTORS["max_tokens"](limits.max_length)
        self.budget: Budget = budget or FixedBudget()
        self.waiting = WaitingQueue(self.policy)
        self.counters = Counters()
        self.admission = self.memory.admission
        self.blocked_by = ""  # what kept the next request out of the last plan: rows, blocks, tokens or the gate
        self.is_input_over = False  # no other request is expected: a batch need not wait until it is full
        self._cost = cost  # the cost model to update with step times, if a part of the scheduler uses it
        self._live: dict[str, list[Sequence]] = {}  # each request's sequences that have not ended
        self.policy.cached = self.admission.known
        self.policy.peek_cached = lambda each: self.admission.known(each, self.memory.prefixes.look_up(each))
        self.batch = RunningBatch(limits.max_sequences, self.memory, self.policy, self.waiting, self.counters)
        self.running = self.memory.prefixes.running = self.batch.running
        self._is_trusted = True
        self._plans = 0
        self._prompt_steps = 0  # consecutive steps without decodes
        self._moved: list[Sequence] = []  # beams that continue another one: the executor gets their new tokens
        self._constrained = 0  # live requests with a constraint
        # Proposes tokens that may come next in a sequence; the next step checks them all at once.
        self.drafter: Callable[[Sequence], list[int]] | None = None

    # ---- requests in and out

    def submit(self, request: Request) -> None:
        """Queue a request, or refuse it with a RequestError."""
        order = self.counters.submitted
        self.counters.submitted += 1
        try:
            if request.id in self._live:
                raise RequestError(f"request id {request.id!r} is in use: choose another or wait until it has ended")
            self.limits.check(request)
            limit = self.limits.longest(request)
            self.admission.check_beams(request, limit)
        except RequestError:
            self.counters.rejected += 1
            raise
        sequence = Sequence(request, order, limit)
        if request.params.use_beam_search:
            sequence.group = Beams(sequence, limit)
        if self.policy.needs_lengths:
            sequence.expected = self.predictor.predict(request)
        self._live[request.id] = [sequence]
        self._constrained += request.constraint is not None
        self.policy.arrived(sequence)
        sequence.rank = (self.policy.key(sequence), order, 0)
        self.waiting.push(sequence, request.arrival)

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
        """Whether any request has not ended."""
        return bool(self._live)

    @property
    def serves_in_order(self) -> bool:
        """Whether waiting requests are admitted in order of arrival, as soon as there is room."""
        return self.policy.is_in_order and not self.gate.closes

    def is_live(self, request_id: str) -> bool:
        """Whether a request has not ended."""
        return request_id in self._live

    def find(self, request_id: str, index: int) -> Sequence | None:
        """Return a sequence of a request, if it has not ended."""
        return next((each for each in self._live.get(request_id, ()) if each.index == index), None)

    # ---- one step

    def plan(self, now: float) -> StepPlan:
        """Choose the slices of one forward pass."""
        step = StepPlan()
        self._plans += 1
        if self.policy.reads_cache and self._plans % max(_REKEY, len(self.waiting) // _REKEY) == 0:
            self.waiting.rekey()
        if self.policy.is_preemptive and len(self.waiting) and not self.gate.closes:
            self._preempt_for_waiting(step, now)
        preempted = len(step.preempted)
        if self._prompt_steps < self.prefill.decodes_wait:
            self._prompt_steps += 1
            self._extend_prompts(step, self._in_prefill())
            self._admit(step, now)
            if not step:
                self._prompt_steps = 0
                self._extend(step)
        else:
            self._prompt_steps = 0
            self._extend(step)  # decodes and unfinished prompts first: an admission never stalls a running sequence
            if len(step.preempted) == preempted:
                self._admit(step, now)
            else:
                self.blocked_by = "blocks"  # under memory pressure, admitting would only thrash
        self.admission.watermark.learn(len(step.preempted) > preempted)
        step.placed += (each for each in self._moved if each.phase is Phase.RUNNING and each not in step.placed)
        self._moved.clear()
        self.memory.finish(step)
        step.number()
        if self._constrained:
            step.masked = [place for place, each in enumerate(step.samples) if each.constraint is not None]
        return step

    def masks(self, step: StepPlan) -> tuple[list[bytes | None], list[Event]]:
        """Return the masks of a step's constrained samples, once the tokens before them are known.

        A constraint that fails ends its request: the events say so.
        """
        masks: list[bytes | None] = []
        events: list[Event] = []
        for sequence in (step.samples[place] for place in step.masked):
            mask = None
            if sequence.phase is not Phase.DONE and sequence.constraint is not None:
                try:
                    mask = sequence.constraint.mask()
                except Exception as error:
                    events += self._fail_constraint(sequence, error)
            masks.append(mask)
        return masks, events

    def pause(self, now: float) -> float:
        """Return the seconds for which no step can run: the batch is empty, and the gate waits for more requests."""
        if self.running or not len(self.waiting):
            return 0.0
        return self.gate.pause(self._gate_view(now), now)

    def stuck(self, now: float) -> Sequence:
        """Return the sequence to end when plans stay empty though there are requests and no step is in flight.

        The last running one: the others lack what it holds. If none runs, the first waiting one, which blocks the rest.
        """
        return self.running[-1] if self.running else self.waiting.peek(now) or next(iter(self.waiting))

    def observe(self, step: StepPlan, seconds: float) -> None:
        """Update the cost model with the time of a step."""
        if self._cost is not None:
            self._cost.learn(work_of(step), seconds)

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
                events += self._end(self._live[request.id], FinishReason.ERROR, request.no_token_error)
        if counts is not None:
            return self._apply_drafts(step, result, counts, events)
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
        return Outcome([sequence for sequence, _ in usual], [token for _, token in usual], events)

    def _apply_drafts(self, step: StepPlan, result: StepResult, counts: list[int], events: list[Event]) -> Outcome:
        """Append the tokens of a step that checked drafts, for each sample those accepted and one more."""
        outcome = Outcome(events=events)
        tokens = zip(result.tokens, result.logprobs or repeat(None), strict=False)
        for sequence, count in zip(step.samples, counts, strict=True):
            taken = list(islice(tokens, count))
            if sequence.is_done:
                continue
            sequence.rewind(sequence.unchecked + 1 - count)
            sequence.unchecked = 0
            own = self._take_all(sequence, taken)
            if any(event.finish_reason or event.logprobs for event in own) or len(own) < count:
                events += own
            else:
                outcome.sequences += repeat(sequence, count)
                outcome.tokens += (token for token, _ in taken)
        return outcome

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
        sequence.tokens.append(token)
        if sequence.constraint is not None:
            try:
                sequence.constraint.accept(token)
            except Exception as error:
                return self._fail_constraint(sequence, error)
        reason = None
        if token in sequence.stop_ids:
            reason = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._retire([sequence], reason)
        return None if reason is None and scored is None else [Event(sequence, token, reason, scored)]

    def _fail_constraint(self, sequence: Sequence, error: Exception) -> list[Event]:
        """End the request of a constraint that raised."""
        message = f"the constraint on the answer failed: {type(error).__name__}: {error}"
        return self._end(self._live[sequence.request.id], FinishReason.ERROR, message)

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

    # ---- choosing

    def _extend(self, step: StepPlan) -> None:
        """Give every running sequence its next slice, in rank order; prompts share what the decodes leave."""
        # Decodes always fit: a step has at least as many tokens as the batch has rows (Limits).
        samples, starts = step.samples, step.starts
        prompts: list[Sequence] = []
        drafted: list[tuple[Sequence, list[int]]] = []
        for sequence in self.running.copy():
            start = sequence.computed
            if start < sequence.decode_until:
                sequence.computed = start + 1
                sequence.length = start + 2
            elif not self._may_decode(step, sequence, prompts, drafted):
                continue
            samples.append(sequence)
            starts.append(start)
        step.sequences += samples
        step.counts += repeat(1, len(samples))
        step.tokens = len(samples)
        step.sampled_at += range(len(samples))
        for place, (sequence, drafts) in enumerate(drafted):
            self._check_drafts(step, sequence, drafts, len(drafted) - place)
        if prompts:
            self._extend_prompts(step, prompts)

    def _may_decode(
        self,
        step: StepPlan,
        sequence: Sequence,
        prompts: list[Sequence],
        drafted: list[tuple[Sequence, list[int]]],
    ) -> bool:
        """Whether a sequence decodes one token in this step; if its slice is longer, add it to one of the lists."""
        if sequence.phase is not Phase.RUNNING:
            return False  # this plan has preempted it
        if sequence.unchecked:
            return False  # its next position depends on how many drafts in flight are accepted
        length = sequence.length
        if length >= sequence.limit:
            return False  # its last token is in flight
        if sequence.is_search and not self.batch.may_search(step, sequence):
            return False
        if length - sequence.computed > 1 or not sequence.is_forked:  # the last of a prompt may yet have to fork
            prompts.append(sequence)
            return False
        if length > sequence.table.writable and not self.batch.grow(step, sequence, length):
            return False
        if self.drafter is None:
            if not sequence.is_search:
                sequence.decode_until = min(sequence.limit - 1, sequence.table.writable)
        elif self._may_draft(sequence) and (drafts := self.drafter(sequence)):
            drafted.append((sequence, drafts))
            return False
        sequence.computed = length
        sequence.length = length + 1
        return True

    def _may_draft(self, sequence: Sequence) -> bool:
        """Whether its last token is known, and drafts can be checked with its next one."""
        return not sequence.in_flight and not sequence.is_search and sequence.constraint is None

    def _check_drafts(self, step: StepPlan, sequence: Sequence, drafts: list[int], left: int) -> None:
        """Add a decode with the drafts behind it that fit; `left` sequences, this one included, need a token each.

        A draft preempts no sequence: it gets only blocks that are available.
        """
        start, length = sequence.computed, sequence.length
        room = self._budget(step, start) - step.tokens - left
        count = max(0, min(len(drafts), room, sequence.limit - length - 1))
        while count and not self.memory.can_grow(sequence, length + count):
            count -= 1
        if length + count > sequence.table.writable:
            self.memory.grow(step, sequence, length + count)
        if count:
            step.drafts.append((len(step.samples), drafts[:count]))
        step.sequences.append(sequence)
        step.starts.append(start)
        step.counts.append(1 + count)
        step.tokens += 1 + count
        step.samples.append(sequence)
        step.sampled_at.append(step.tokens - 1)
        sequence.computed = length + count
        sequence.length = length + count + 1
        sequence.unchecked = count

    def _extend_prompts(self, step: StepPlan, prompts: list[Sequence]) -> None:
        for sequence in self.policy.arrange(prompts) if len(prompts) > 1 else prompts:
            self._add_chunk(step, sequence)

    def _in_prefill(self) -> list[Sequence]:
        """Return the running sequences that have more than their next token to compute."""
        return [each for each in self.running if each.length - each.computed > 1 or not each.is_forked]

    def _admit(self, step: StepPlan, now: float) -> None:
        """Admit waiting groups in order until budget, rows or blocks run out; the first that does not fit ends it."""
        self.blocked_by = ""
        if not len(self.waiting):
            return
        if self.gate.closes:
            if not self.running:
                self.waiting.keep_lane(self.limits.max_sequences, now)
            if not self.gate.is_open(self._gate_view(now), now):
                self.blocked_by = "gate"
                return
        while not self.blocked_by:
            sequence = self.waiting.peek(now)
            if sequence is None:
                break
            # A sequence is not resumed by the plan that preempts it: its blocks are not saved yet.
            self.blocked_by = "blocks" if sequence in step.preempted else self.batch.blocked_by(sequence)
            if not self.blocked_by:
                known = self.admission.known(sequence)
                room = self._budget(step, known) - step.tokens
                if room <= 0 or not self.prefill.chunk(len(sequence.tokens) - known, room):
                    self.blocked_by = "tokens"
                    break
                self.batch.admit(step, sequence, now)
                for each in list(sequence.group.members):
                    self._add_chunk(step, each)
        if self.blocked_by != "tokens":  # a request that lacks tokens may join the same batch in the next step
            self.gate.close()

    def _preempt_for_waiting(self, step: StepPlan, now: float) -> None:
        """Preempt running sequences for waiting ones, where the policy wants that, and admit these at once."""
        while (newcomer := self.waiting.peek(now)) is not None and self.batch.blocked_by(newcomer):
            if newcomer in step.preempted or not self.batch.preempt_for(step, newcomer):
                return
            self.batch.admit(step, newcomer, now)

    def _gate_view(self, now: float) -> GateView:
        first = self.waiting.peek(now)
        since = now if first is None else first.request.arrival
        is_last = self.is_input_over or (first is not None and first.started is not None)
        return GateView(len(self.running), self.waiting.largest(), self.limits.max_sequences, since, is_last)

    def _budget(self, step: StepPlan, computed: int) -> int:
        """Return the tokens that the step may hold, if the next ones belong to a prompt with `computed` tokens done."""
        return self.budget.tokens(step, self.prefill.step_tokens, computed)

    def _add_chunk(self, step: StepPlan, sequence: Sequence) -> None:
        """Add as much of a prompt as fits; its last token is sampled, once for every sibling."""
        remaining = sequence.length - sequence.computed
        count = self.prefill.chunk(remaining, max(0, self._budget(step, sequence.computed) - step.tokens))
        if not count:
            return
        self.memory.free_outside_window(sequence)
        step.sequences.append(sequence)
        step.starts.append(sequence.computed)
        step.counts.append(count)
        step.tokens += count
        sequence.computed += count
        self.memory.prefixes.insert(sequence, min(sequence.computed, len(sequence.tokens)), step)
        if count == remaining:
            sequence.length += 1
            for sampler in (sequence, *self._fork(step, sequence)):
                step.samples.append(sampler)
                step.sampled_at.append(step.tokens - 1)

    def _fork(self, step: StepPlan, sequence: Sequence) -> list[Sequence]:
        """Create the prompt's siblings, which share its blocks, in the rows that were reserved for them."""
        if sequence.is_forked:
            return []
        sequence.group.reserved = 0
        sequence.preemptions = 0  # from now on each sequence needs blocks of its own
        siblings = []
        for index in range(1, sequence.request.params.width):
            sibling = Sequence(sequence.request, sequence.order, sequence.limit, index)
            sibling.rank = (sequence.rank[0], sequence.order, index)
            self.memory.fork(sequence, sibling)
            sibling.expected = sequence.expected
            if sequence.is_search:
                sibling.group = sequence.group
                sibling.group.members.append(sibling)
            else:
                sibling.group.reserved = 0
            self._live[sequence.request.id].append(sibling)
            self.policy.arrived(sibling)
            self.batch.place(step, sibling, sequence.started)
            siblings.append(sibling)
        return siblings

    # ---- beams

    def _search(self, sequence: Sequence, candidates: Candidates) -> list[Event]:
        """Take a beam's candidates; with the last beam's, choose those to continue, or end the search."""
        beams = sequence.group
        assert isinstance(beams, Beams), "only beams have candidates"
        if sequence.phase is not Phase.RUNNING or not beams.offer(sequence, candidates):
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

    def _end(self, sequences: Iterable[Sequence], reason: FinishReason, error: str | None = None) -> list[Event]:
        ending = [sequence for sequence in sequences if sequence.phase is not Phase.DONE]
        self._retire(ending, reason)
        return [Event(sequence, finish_reason=reason, error=error) for sequence in ending]

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
            if self.policy.needs_lengths and reason in (FinishReason.STOP, FinishReason.LENGTH):
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
