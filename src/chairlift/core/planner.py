"""The planner: which tokens of which sequences one forward pass computes, under one token budget."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat

from chairlift.core.batch import RunningBatch
from chairlift.core.batching import Gate, GateView
from chairlift.core.budget import Budget
from chairlift.core.limits import Limits
from chairlift.core.memory import Memory
from chairlift.core.plan import StepPlan
from chairlift.core.policy import Policy
from chairlift.core.prefill import PrefillMode
from chairlift.core.queue import WaitingQueue
from chairlift.core.request import Phase, Sequence
from chairlift.core.speculation import Speculation

_COPIED = 8  # a step with running sequences copies arrived blocks of up to its tokens divided by this
_REKEY = 8  # plans after which the queue is sorted again for a policy that reads the prefix cache; more when it is long


class Planner:
    """Extends running sequences and admits waiting ones; the policy, gate, prefill mode and budget decide how."""

    def __init__(
        self,
        limits: Limits,
        memory: Memory,
        batch: RunningBatch,
        waiting: WaitingQueue,
        policy: Policy,
        gate: Gate,
        prefill: PrefillMode,
        budget: Budget,
        on_fork: Callable[[Sequence], None],
    ) -> None:
        self.gate = gate
        self.prefill = prefill
        self.speculation: Speculation | None = None
        self._members = 0  # sequences that the batch of a closing gate has admitted
        self.blocked_by = ""  # what kept the next request out of the last plan: rows, blocks, tokens or the gate
        self.is_input_over = False  # no other request is expected: a batch need not wait until it is full
        self._limits = limits
        self._memory = memory
        self._admission = memory.admission
        self._batch = batch
        self._running = batch.running
        self._waiting = waiting
        self._policy = policy
        self.budget = budget
        self._on_fork = on_fork  # called with each new sibling
        self._plans = 0
        self._prompt_steps = 0  # consecutive steps without decodes

    def plan(self, now: float, moved: list[Sequence]) -> StepPlan:
        """Choose the slices of one forward pass; `moved` are beams that continue another one since the last."""
        step = StepPlan()
        if self._memory.prefixes.exchange.arrived:
            # Copies take time: while sequences run, those of many blocks are spread over several steps.
            blocks = self._limits.step_tokens // self._memory.pool.block_size
            self._memory.prefixes.take_in(step, max(1, blocks // _COPIED) if self._running else blocks + 1)
        self._plans += 1
        if self._policy.reads_cache and self._plans % max(_REKEY, len(self._waiting) // _REKEY) == 0:
            self._waiting.rekey()
        if self._policy.is_preemptive and len(self._waiting) and not self.gate.closes:
            self._preempt_for_waiting(step, now)
        preempted = len(step.preempted)
        if self._prompt_steps < self.prefill.decodes_wait:
            self._prompt_steps += 1
            self._extend_prompts(step, self._in_prefill(step))
            if len(step.preempted) == preempted:
                self._admit(step, now)
            if not step.sequences:
                self._prompt_steps = 0
                self._extend(step)
        else:
            self._prompt_steps = 0
            self._extend(step)  # decodes and unfinished prompts first: an admission never stalls a running sequence
            if len(step.preempted) == preempted:
                self._admit(step, now)
            else:
                self.blocked_by = "blocks"  # under memory pressure, admitting would only thrash
        self._admission.watermark.learn(len(step.preempted) > preempted)
        if moved:
            step.placed += (each for each in moved if each.phase is Phase.RUNNING and each not in step.placed)
        return step

    def pause(self, now: float) -> float:
        """Return the seconds for which no step can run: the batch is empty, and the gate waits for more requests."""
        if self._running or not len(self._waiting):
            return 0.0
        return self.gate.pause(self._gate_view(now), now)

    def _extend(self, step: StepPlan) -> None:
        """Give every running sequence its next slice, in rank order; prompts share what the decodes leave."""
        # Decodes always fit: a step has at least as many tokens as the batch has rows (Limits).
        samples, starts = step.samples, step.starts
        prompts: list[Sequence] = []
        drafting = self._drafting()
        for sequence in self._running.copy():
            start = sequence.computed
            if start < sequence.decode_until and drafting is None:
                sequence.computed = start + 1
                sequence.length = start + 2
            elif not self._may_decode(step, sequence, prompts, drafting):
                continue
            samples.append(sequence)
            starts.append(start)
        drafted = self._choose_drafts(step, drafting, prompts) if drafting else []
        step.sequences += samples
        step.counts += repeat(1, len(samples))
        step.tokens = len(samples)
        step.sampled_at += range(len(samples))
        if drafted:
            self._check_drafts(step, drafted, has_prompts=bool(prompts))
        if prompts:
            self._extend_prompts(step, prompts)

    def _may_decode(
        self,
        step: StepPlan,
        sequence: Sequence,
        prompts: list[Sequence],
        drafting: list[Sequence] | None,
    ) -> bool:
        """Whether a sequence decodes one token in this step; if its slice may be longer, add it to one of the lists."""
        if sequence.phase is not Phase.RUNNING:
            return False  # this plan has preempted it
        if sequence.unchecked:
            return False  # its next position depends on how many drafts in flight are accepted
        length = sequence.length
        if length >= sequence.limit:
            return False  # its last token is in flight
        if sequence.is_search and not self._batch.may_search(step, sequence):
            return False
        if length - sequence.computed > 1 or not sequence.is_forked:  # the last of a prompt may yet have to fork
            if self._may_prefill(step, sequence):
                prompts.append(sequence)
            return False
        table = sequence.tables[-1]  # no other is writable less far
        if length > table.writable and not self._batch.grow(step, sequence, length):
            return False
        if not sequence.is_search:
            sequence.decode_until = min(sequence.limit - 1, table.writable)
            if drafting is not None and not sequence.in_flight and sequence not in step.placed:
                drafting.append(sequence)
                return False
        sequence.computed = length
        sequence.length = length + 1
        return True

    def _drafting(self) -> list[Sequence] | None:
        """Return a list for the sequences that drafts are chosen for in this step; None if none can pay.

        A draft stands behind a known token, so no step may be in flight.
        """
        speculation, running = self.speculation, len(self._running)
        if speculation is None or not running or self._memory.prefixes.in_flight:
            return None
        return [] if speculation.may_pay(running) else None

    def _choose_drafts(
        self, step: StepPlan, drafting: list[Sequence], prompts: list[Sequence]
    ) -> list[tuple[Sequence, list[int]]]:
        """Return the sequences with drafts to check; the others decode."""
        assert self.speculation is not None
        decodes = len(step.samples) + len(drafting)
        waiting = sum(each.length - each.computed for each in prompts)
        beside = min(waiting, max(0, self._limits.step_tokens - decodes))
        drafted: list[tuple[Sequence, list[int]]] = []
        for sequence, (tokens, _) in zip(drafting, self.speculation.choose(drafting, decodes, beside), strict=True):
            if tokens:
                drafted.append((sequence, tokens))
                continue
            step.samples.append(sequence)
            step.starts.append(sequence.computed)
            sequence.computed = sequence.length
            sequence.length += 1
        return drafted

    def _check_drafts(self, step: StepPlan, drafted: list[tuple[Sequence, list[int]]], *, has_prompts: bool) -> None:
        """Add decodes with the drafts behind them that fit, and leave tokens to prompts that need some."""
        room = self.prefill.step_tokens - step.tokens - len(drafted)
        if has_prompts or len(self._waiting):
            room = self.prefill.room_for_drafts(room)
        for place, (sequence, drafts) in enumerate(drafted):
            most = self.budget.tokens_with_drafts(step, self.prefill.step_tokens, sequence.computed)
            fitting = most - step.tokens - (len(drafted) - place)  # each of the others needs a token, too
            room -= self._check(step, sequence, drafts[: max(0, min(room, fitting))])

    def _check(self, step: StepPlan, sequence: Sequence, drafts: list[int]) -> int:
        """Add a decode with those drafts behind it that have blocks; return how many.

        A draft preempts no sequence: it gets only blocks that are available.
        """
        start, length = sequence.computed, sequence.length
        count = max(0, min(len(drafts), sequence.limit - length - 1))
        self._memory.free_outside_windows(sequence)
        while count and not self._memory.can_grow(sequence, length + count):
            count -= 1
        if length + count > sequence.tables[-1].writable:
            self._memory.grow(step, sequence, length + count)
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
        # It may be rewound: where the next decode is written is known when the check is applied.
        sequence.decode_until = 0
        return count

    def _extend_prompts(self, step: StepPlan, prompts: list[Sequence]) -> None:
        for sequence in self._policy.arrange(prompts) if len(prompts) > 1 else prompts:
            self._add_chunk(step, sequence)

    def _in_prefill(self, step: StepPlan) -> list[Sequence]:
        """Return the running sequences that have more than their next token to compute."""
        prompts = [each for each in self._running if each.length - each.computed > 1 or not each.is_forked]
        return [each for each in prompts if each.phase is Phase.RUNNING and self._may_extend(step, each)]

    def _may_extend(self, step: StepPlan, sequence: Sequence) -> bool:
        """Whether a sequence in prefill has blocks for its next chunk; beams must have them for all of them."""
        may_search = not sequence.is_search or self._batch.may_search(step, sequence)
        return may_search and self._may_prefill(step, sequence)

    def _may_prefill(self, step: StepPlan, sequence: Sequence) -> bool:
        """Whether a prompt has blocks for its next chunk; those of groups with a window are allocated now."""
        length = min(sequence.length, sequence.computed + self._limits.step_tokens)
        return length <= sequence.tables[-1].writable or self._batch.grow(step, sequence, length)

    def _admit(self, step: StepPlan, now: float) -> None:
        """Admit waiting groups in order until budget, rows or blocks run out; the first that does not fit ends it."""
        self.blocked_by = ""
        if not len(self._waiting):
            return
        if self.gate.closes:
            if not self._running:
                self._waiting.keep_lane(self._limits.max_sequences, now)
                self._members = 0
            if not self.gate.is_open(self._gate_view(now), now):
                self.blocked_by = "gate"
                return
        while not self.blocked_by:
            sequence = self._waiting.peek(now)
            if sequence is None:
                break
            # A sequence is not resumed by the plan that preempts it: its blocks are not saved yet.
            self.blocked_by = "blocks" if sequence in step.preempted else self._batch.blocked_by(sequence)
            if not self.blocked_by:
                known = self._admission.known(sequence)
                room = self._budget(step, known) - step.tokens
                if room <= 0 or not self.prefill.chunk(len(sequence.tokens) - known, room):
                    self.blocked_by = "tokens"
                    break
                self._batch.admit(step, sequence, now)
                self._members += sequence.group.rows
                for each in list(sequence.group.members):
                    self._add_chunk(step, each)
                if self.gate.closes and self._members >= self._limits.max_sequences:
                    # Its first members may have ended already: a batch that went on filling would never end.
                    self.blocked_by = "gate"
        if self.blocked_by != "tokens":  # a request that lacks tokens may join the same batch in the next step
            self.gate.close()

    def _preempt_for_waiting(self, step: StepPlan, now: float) -> None:
        """Preempt running sequences for waiting ones, where the policy allows it, and admit these at once."""
        while (newcomer := self._waiting.peek(now)) is not None and self._batch.blocked_by(newcomer):
            if newcomer in step.preempted or not self._batch.preempt_for(step, newcomer):
                return
            self._batch.admit(step, newcomer, now)

    def _gate_view(self, now: float) -> GateView:
        first = self._waiting.peek(now)
        since = now if first is None else first.request.arrival
        is_last = self.is_input_over or (first is not None and first.started is not None)
        return GateView(len(self._running), self._waiting.largest(), self._limits.max_sequences, since, is_last)

    def _budget(self, step: StepPlan, computed: int) -> int:
        """Return the tokens that the step may hold, if the next ones belong to a prompt with `computed` tokens done."""
        return self.budget.tokens(step, self.prefill.step_tokens, computed)

    def _add_chunk(self, step: StepPlan, sequence: Sequence) -> None:
        """Add as much of a prompt as fits; its last token is sampled, once for every sibling."""
        remaining = sequence.length - sequence.computed
        count = self.prefill.chunk(remaining, max(0, self._budget(step, sequence.computed) - step.tokens))
        if not count:
            return
        step.sequences.append(sequence)
        step.starts.append(sequence.computed)
        step.counts.append(count)
        step.tokens += count
        sequence.computed += count
        self._memory.prefixes.insert(sequence, min(sequence.computed, len(sequence.tokens)), step)
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
            sibling = Sequence(sequence.request, sequence.order, sequence.limit, index, groups=0)
            sibling.rank = (sequence.rank[0], sequence.order, index)
            self._memory.fork(sequence, sibling)
            sibling.expected = sequence.expected
            if sequence.is_search:
                sibling.group = sequence.group
                sibling.group.members.append(sibling)
            else:
                sibling.group.reserved = 0
            self._on_fork(sibling)
            self._batch.place(step, sibling, sequence.started)
            siblings.append(sibling)
        return siblings
