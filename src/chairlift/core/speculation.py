"""Speculation: chooses how many drafts of each sequence a step checks, for the most tokens a second.

Each sequence has an acceptance estimate p: a check of k drafts is expected to add p + p^2 + ... + p^k tokens to the one
of a decode. The drafts of all sequences are ordered by these gains. Step times predict the seconds of a step with the
first draft, the first two, and so on; the number with the most expected tokens a second is chosen, which may be 0.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from chairlift.core.drafting import GRADES, MAX_DRAFTS, NOTHING, Drafter, Proposal
from chairlift.core.plan import StepPlan
from chairlift.core.request import Sequence
from chairlift.core.step_times import StepTimes

MOST_IN_STEP = 256  # drafts: each needs a row of logits over the whole vocabulary
_PRIOR = 16.0  # weight of the acceptance of a proposal's grade in a sequence's estimate, in drafts
_UNTRIED, _UNTRIED_DRAFTS = 0.6, 24.0  # acceptance of a grade without checks, and its weight in drafts
_FORGET = 0.95  # per check, of a sequence's own drafts; per 1 / (1 - _FORGET_GRADE) checks, of a grade's
_FORGET_GRADE = 0.99
_FORGET_SKIPPED = 0.999  # per step in which a proposal was not checked: after some hundred, a sequence is tried again
_ALIKE = 8  # gains that differ by less than 1 / 8 count as equal
_CERTAIN = 0.98  # highest acceptance estimate
_RATE = 0.1  # share of each measurement in an average
_OVERHEAD_RATE = 0.2  # share of a step's error that corrects the overhead of checks
_LARGEST_ERROR = 0.5  # of a step with drafts that counts, relative to the predicted seconds: some disturb the device
_DRAFTING_WEIGHT = 0.01  # weight of each pass of the draft model in that error, relative to the overhead's 1
# A trial: an overlapped engine that checks no drafts collects a step early, at least every 2 ** _LONGEST_REST steps.
_LONGEST_REST = 9
# A trial checks drafts that are predicted to be slower than none by this share or less, since the prediction may be
# wrong; by a smaller one after each trial without a gain.
_TRIAL_LOSS, _TRIAL_LOSS_FALLS = 0.25, 0.75


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


@dataclass(slots=True)
class Regime:
    """What was learned of checks in batches of about one size."""

    # Seconds that a step with drafts takes beside its pass and its drafting: an overlapped engine collects the step
    # before it first, and plans while the device waits.
    overhead: float | None = None
    misses: int = 0  # trials in a row without a draft that was predicted to pay
    steps_to_trial: int = 0


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
        self._regimes: defaultdict[int, Regime] = defaultdict(Regime)  # by the bits of the number of decodes
        self._draft_times = draft_times  # of one pass of a draft model, by the number of sequences
        self._hits = [0.0] * GRADES
        self._tries = [0.0] * GRADES
        self._reads_prompts = False  # whether the draft model reads prompts in the step that is planned
        self._steps_since_drafts = 0  # steps since `choose` was last called
        self._is_trial = False  # whether the step that is planned is a trial

    def acceptance(self, sequence: Sequence, grade: int = 0) -> float:
        """Return the probability that the next draft of a sequence is accepted, if those before it are."""
        usual = (self._hits[grade] + _UNTRIED * _UNTRIED_DRAFTS) / (self._tries[grade] + _UNTRIED_DRAFTS)
        return min(_CERTAIN, (sequence.hits + _PRIOR * usual) / (sequence.tries + _PRIOR))

    def may_pay(self, decodes: int) -> bool:
        """Whether drafts with the highest acceptance estimate would pay in a step with this many decodes."""
        if self.fixed is not None:
            return True
        most = decodes + min(decodes * self.max_drafts, self._most)
        now = self.times.seconds(decodes) / decodes
        size, gain = decodes, 0.0
        while size < most:
            size = min(most, 2 * size)
            gain = decodes + (size - decodes) * _CERTAIN
            depth = -(-(size - decodes) // decodes)
            if (self.times.seconds(size) + self._drafting(decodes, depth) + self.overhead(decodes)) / gain < now:
                return True
        return False

    def collects_early(self, is_checking: bool, running: list[Sequence]) -> bool:
        """Whether to collect the step in flight before the next is planned: drafts need all tokens before them."""
        self._is_trial = False
        if is_checking:
            return True
        self._steps_since_drafts += 1
        regime = self._regime(len(running))
        regime.steps_to_trial -= 1
        self._is_trial = regime.steps_to_trial < 0 and any(map(_may_draft, running)) and self.may_pay(len(running))
        return self._is_trial

    def choose(self, sequences: list[Sequence], decodes: int, prompt_tokens: int) -> list[Proposal]:
        """Return the drafts of each sequence to check in a step; most may have none.

        The step has `decodes` decodes, those of `sequences` included, and `prompt_tokens` tokens of prompts.
        """
        proposals = [self._propose(sequence) for sequence in sequences]
        gains = self._gains(sequences, proposals)
        if self.fixed is None:
            gains = gains[: self._count(gains, len(sequences), decodes, prompt_tokens)]
        depths = [0] * len(sequences)
        for _, place, depth in gains:
            depths[place] = max(depths[place], depth)
        kept, self._steps_since_drafts = _FORGET_SKIPPED ** max(1, self._steps_since_drafts), 0
        for sequence, proposal, depth in zip(sequences, proposals, depths, strict=True):
            if proposal.tokens and not depth:
                sequence.hits *= kept
                sequence.tries *= kept
                self._hits[proposal.grade] *= kept
                self._tries[proposal.grade] *= kept
            sequence.grade = proposal.grade
        self._reads_prompts = any(
            depth and not sequence.drafted for sequence, depth in zip(sequences, depths, strict=True)
        )
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
        """Return (expected tokens, place of the sequence, depth) of the best drafts, the best first."""
        # Equal gains are ordered by the length of the answer, shortest first: otherwise the same sequences would be
        # drafted in every step, and the others end late. Plain tuples, since there may be a thousand.
        found = []
        for place, (sequence, (tokens, grade)) in enumerate(zip(sequences, proposals, strict=True)):
            if not tokens:
                continue
            acceptance = gain = self.acceptance(sequence, grade)
            length = len(sequence.tokens) - sequence.prompt_length
            for depth in range(1, len(tokens) + 1):
                found.append((-int(_ALIKE * gain), depth, length, place, gain))
                gain *= acceptance
        found.sort()
        return [(gain, place, depth) for _, depth, _, place, gain in found[: self._most]]

    def _count(self, gains: list[tuple[float, int, int]], drafting: int, decodes: int, prompt_tokens: int) -> int:
        """Return the number of drafts, from the first on, with the most expected tokens a second."""
        size, most, overhead = decodes + prompt_tokens, len(gains), self.overhead(decodes)
        none = decodes / self.times.seconds(size)
        regime = self._regime(decodes)
        loss = _TRIAL_LOSS * _TRIAL_LOSS_FALLS**regime.misses if self._is_trial else 0.0
        best, count = (1 - loss) * none, 0
        expected, deepest = float(decodes), 0
        for number, (gain, _, depth) in enumerate(gains, 1):
            expected += gain
            deepest = max(deepest, depth)
            if number < most and gains[number][2] <= deepest and not self.times.rises_after(size + number):
                continue  # the next draft costs no time
            seconds = self.times.seconds(size + number) + self._drafting(drafting, deepest) + overhead
            if expected / seconds > best:
                best, count = expected / seconds, number
        if best > none:
            regime.misses = 0
        else:
            regime.misses = min(regime.misses + 1, _LONGEST_REST)
            regime.steps_to_trial = 1 << regime.misses
        return count

    def _regime(self, decodes: int) -> Regime:
        return self._regimes[decodes.bit_length()]

    def overhead(self, decodes: int) -> float:
        """Return the seconds that a step with drafts takes beside its pass and its drafting."""
        found = self._regime(decodes).overhead
        if found is None:  # that of the batch size next to it
            bits = decodes.bit_length()
            regimes = self._regimes.items()
            known = [(abs(each - bits), of.overhead) for each, of in regimes if of.overhead is not None]
            found = min(known, default=(0, 0.0))[1]
        return found

    def _drafting(self, sequences: int, depth: int) -> float:
        """Return the seconds that drafting takes."""
        if self._draft_times is None:
            return self.drafter.seconds * sequences
        return depth * self._draft_times.seconds(sequences)

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Update the estimates from a check; drafts after the first rejected one do not count."""
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
        """Update the step times from a finished step, if it had no prompts."""
        drafts = sum(len(tokens) for _, tokens in step.drafts)
        if step.tokens != len(step.samples) + drafts:
            return
        if not drafts:
            self.times.learn(step.tokens, seconds)
            return
        rows, deepest = len(step.drafts), max(len(tokens) for _, tokens in step.drafts)
        decodes = len(step.samples)
        overhead = self.overhead(decodes)
        if self._draft_times is None:
            self.times.learn(step.tokens, seconds - overhead - self._drafting(rows, deepest))
            return
        if self._reads_prompts:
            return
        # Steps without drafts give the time of the model's pass. The rest of the error is divided between the overhead,
        # which has no measured start value, and the passes of the draft model, which have one. Checks of several depths
        # distinguish the two.
        draft_pass = self._draft_times.seconds(rows)
        predicted = self.times.seconds(step.tokens) + deepest * draft_pass + overhead
        error = max(-_LARGEST_ERROR * predicted, min(_LARGEST_ERROR * predicted, seconds - predicted))
        share = error / (1 + _DRAFTING_WEIGHT * deepest * deepest)
        self._regime(decodes).overhead = max(0.0, overhead + _OVERHEAD_RATE * share)
        self._draft_times.learn(rows, draft_pass + _DRAFTING_WEIGHT * deepest * share)

    def observe_early(self, step: StepPlan, seconds: float) -> None:
        """Update the overhead with the time for which the device waited while a step was planned and launched."""
        if self._draft_times is None or not step.drafts:  # otherwise `observe_step` learns it
            decodes = len(step.samples)
            overhead = self.overhead(decodes)
            self._regime(decodes).overhead = overhead + _RATE * (seconds - overhead)

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; later drafts may come from its answer."""
        self.drafter.ended(sequence)


def _may_draft(sequence: Sequence) -> bool:
    """Whether a sequence's next slice may have drafts: it is no prompt or beam, and lacks more than one token."""
    is_decode = sequence.length - sequence.computed == 1 and sequence.is_forked
    return is_decode and not sequence.is_search and sequence.limit - sequence.length > 1
