"""Speculation: how many drafts of each sequence a step checks, so that the batch gets the most tokens a second.

Each sequence has an acceptance estimate p: a check of k drafts is expected to bring p + p^2 + ... + p^k tokens beside
the one that a decode brings. The drafts of all sequences are ordered by these gains. Step times tell what a step takes
with the first of them, the first two, and so on; the number with the most expected tokens a second is chosen, and that
may be none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.core.drafting import GRADES, MAX_DRAFTS, NOTHING, Drafter, Proposal
from chairlift.core.plan import StepPlan
from chairlift.core.request import Sequence
from chairlift.core.step_times import StepTimes

MOST_IN_STEP = 256  # drafts: each needs a row of logits over the whole vocabulary
_PRIOR = 6.0  # drafts that the usual acceptance of a proposal's grade counts as, beside a sequence's own
_HOPE, _HOPED = 0.6, 4.0  # the acceptance of a grade that was never tried, and the drafts that it counts as
_FORGET = 0.95  # per check, of a sequence's own drafts; per 1 / (1 - _FORGET_GRADE) checks, of a grade's
_FORGET_GRADE = 0.99
_FORGET_SKIPPED = 0.998  # per proposal that was not checked: after some hundred, a sequence is tried again
_ALIKE = 8  # gains are about equal that differ by less than 1 / 8
_CERTAIN = 0.98  # highest estimate
_RATE = 0.1  # share of each measurement in an average
_REST = 5  # after 2 ** 5 steps at most, an overlapped engine that drafts nothing collects a step early to try again


@dataclass(slots=True)
class Drafted:
    """Counts of drafts, by position in their check."""

    checks: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)

    def add(self, drafted: int, accepted: int) -> None:
        """Count one check."""
        self.checks += 1
        for place in range(drafted):
            self.drafted[place] += 1
        for place in range(accepted):
            self.accepted[place] += 1


class Speculation:
    """Chooses the drafts of every step, and learns what was accepted."""

    def __init__(
        self,
        drafter: Drafter,
        times: StepTimes,
        max_drafts: int = MAX_DRAFTS,
        most: int = MOST_IN_STEP,
        draft_times: StepTimes | None = None,
    ) -> None:
        self.drafter = drafter
        self.times = times
        self.counts = Drafted()
        self.max_drafts = max_drafts
        self._most = most  # drafts in a step
        self.fixed: int | None = None  # drafts of every check, in experiments only
        self.early_seconds = 0.0  # that an overlapped engine loses when it collects a step before it plans the next
        self._draft_times = draft_times  # of one pass of a draft model, by the number of sequences
        self._hits = [0.0] * GRADES
        self._tries = [0.0] * GRADES
        self._misses = 0  # steps collected early in a row without a draft that was worth it
        self._rest = 0  # steps until the next is collected early

    def acceptance(self, sequence: Sequence, grade: int = 0) -> float:
        """Return the probability that the next draft of a sequence is accepted, if those before it are."""
        usual = (self._hits[grade] + _HOPE * _HOPED) / (self._tries[grade] + _HOPED)
        return min(_CERTAIN, (sequence.hits + _PRIOR * usual) / (sequence.tries + _PRIOR))

    def may_pay(self, decodes: int) -> bool:
        """Whether a draft could pay in a step with so many decodes, were it as good as certain."""
        if self.fixed is not None:
            return True
        most = decodes + min(decodes * self.max_drafts, self._most)
        now = self.times.seconds(decodes) / decodes
        size, gain = decodes, 0.0
        while size < most:
            size = min(most, 2 * size)
            gain = decodes + (size - decodes) * _CERTAIN
            depth = -(-(size - decodes) // decodes)
            if (self.times.seconds(size) + self._drafting(decodes, depth)) / gain < now:
                return True
        return False

    def collects_early(self, is_checking: bool, running: int) -> bool:
        """Whether to collect the step in flight before the next is planned: drafts need all tokens before them."""
        if is_checking:
            return True
        self._rest -= 1
        return self._rest < 0 and running > 0 and self.may_pay(running)

    def choose(self, sequences: list[Sequence], decodes: int, prompt_tokens: int) -> list[Proposal]:
        """Return the drafts to check of each sequence, none of most, in a step of `decodes` decodes, these included.

        `prompt_tokens` are in the same step.
        """
        proposals = [self._propose(sequence) for sequence in sequences]
        gains = self._gains(sequences, proposals)
        if self.fixed is None:
            gains = gains[: self._count(gains, len(sequences), decodes, prompt_tokens)]
        depths = [0] * len(sequences)
        for _, place, depth in gains:
            depths[place] = max(depths[place], depth)
        for sequence, proposal, depth in zip(sequences, proposals, depths, strict=True):
            if proposal.tokens and not depth:
                sequence.hits *= _FORGET_SKIPPED
                sequence.tries *= _FORGET_SKIPPED
                self._hits[proposal.grade] *= _FORGET_SKIPPED
                self._tries[proposal.grade] *= _FORGET_SKIPPED
            sequence.grade = proposal.grade
        return [
            Proposal(proposal.tokens[:depth], proposal.grade) for proposal, depth in zip(proposals, depths, strict=True)
        ]

    def _propose(self, sequence: Sequence) -> Proposal:
        most = min(self.max_drafts if self.fixed is None else self.fixed, sequence.limit - sequence.length - 1)
        if most <= 0:
            return NOTHING
        found = self.drafter.propose(sequence, most)
        if found.tokens and sequence.constraint is not None:
            try:
                return Proposal(found.tokens[: sequence.constraint.count_allowed(found.tokens)], found.grade)
            except Exception:  # the step asks for the same mask and reports the error
                return NOTHING
        return found

    def _gains(self, sequences: list[Sequence], proposals: list[Proposal]) -> list[tuple[float, int, int]]:
        """Return (expected tokens, number of the sequence, depth) of the best drafts, the best first."""
        found = []
        for place, (sequence, (tokens, grade)) in enumerate(zip(sequences, proposals, strict=True)):
            acceptance = gain = self.acceptance(sequence, grade)
            for depth in range(1, len(tokens) + 1):
                found.append((gain, place, depth))
                gain *= acceptance
        # Of about equal gains, those of the sequence with the shortest answer first: else some would always be drafted
        # and others never, and end late.
        lengths = [len(sequence.tokens) - sequence.prompt_length for sequence in sequences]
        found.sort(key=lambda each: (-int(_ALIKE * each[0]), each[2], lengths[each[1]]))
        return found[: self._most]

    def _count(self, gains: list[tuple[float, int, int]], drafting: int, decodes: int, prompt_tokens: int) -> int:
        """Return how many of the drafts bring the most tokens a second."""
        size = decodes + prompt_tokens
        plain = best = decodes / self.times.seconds(size)
        expected, count, deepest, worth = float(decodes), 0, 0, plain
        for number, (gain, _, depth) in enumerate(gains, 1):
            expected += gain
            deepest = max(deepest, depth)
            seconds = self.times.seconds(size + number) + self._drafting(drafting, deepest)
            if expected / seconds > best:
                best, count = expected / seconds, number
                worth = expected / (seconds + self.early_seconds)
        if worth > plain:
            self._misses = 0
        else:
            self._misses = min(self._misses + 1, _REST)
            self._rest = 1 << self._misses
        return count

    def _drafting(self, sequences: int, depth: int) -> float:
        """Return the seconds that drafting takes."""
        if self._draft_times is None:
            return self.drafter.seconds * sequences
        return depth * self._draft_times.seconds(sequences)

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learn from a check: drafts behind the first rejected one tell nothing."""
        tried = min(accepted + 1, drafted)
        sequence.hits = _FORGET * sequence.hits + accepted
        sequence.tries = _FORGET * sequence.tries + tried
        grade = sequence.grade
        self._hits[grade] = _FORGET_GRADE * self._hits[grade] + accepted
        self._tries[grade] = _FORGET_GRADE * self._tries[grade] + tried
        sequence.drafted += drafted
        sequence.accepted += accepted
        self.counts.add(drafted, accepted)

    def observe_step(self, step: StepPlan, seconds: float) -> None:
        """Learn how long a step took, if it had no prompts."""
        drafts = sum(len(tokens) for _, tokens in step.drafts)
        if step.tokens != len(step.samples) + drafts:
            return
        if drafts:
            deepest = max(len(tokens) for _, tokens in step.drafts)
            seconds -= self.early_seconds
            if self._draft_times is not None:
                # Steps without drafts tell what a check takes. What is beyond that, the host's work between the passes
                # of the draft model included, is the price of drafting.
                self._draft_times.learn(len(step.drafts), (seconds - self.times.seconds(step.tokens)) / deepest)
                return
            seconds -= self._drafting(len(step.drafts), deepest)
        self.times.learn(step.tokens, seconds)

    def observe_early(self, seconds: float) -> None:
        """Learn what it costs to plan a step while the device waits."""
        self.early_seconds += _RATE * (seconds - self.early_seconds)

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; its answer may help others."""
        self.drafter.ended(sequence)
