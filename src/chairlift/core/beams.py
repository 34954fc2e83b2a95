"""Beam search: the likeliest answers as a whole, of those that a few sequences side by side can reach.

The sequences are forks of one prompt. In every round each offers its likeliest next tokens; the best of all offers go
on, each as a fork of the sequence that it continues, and those that end are kept as answers. What is chosen, and when
the search is over, is as in transformers, so that both give the same answers.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from chairlift.core.plan import Event, TokenLogprobs
from chairlift.core.request import FinishReason, Request, Sequence


class Beam(NamedTuple):
    """A way through the answers: its score so far, its last token, and the way before."""

    score: float
    parent: Sequence
    length: int = 0
    last: TokenLogprobs | None = None
    before: Beam | None = None

    @property
    def token(self) -> int:
        """The last of its tokens."""
        assert self.last is not None, "nothing has been chosen yet"
        return self.last.token

    @property
    def trail(self) -> list[TokenLogprobs]:
        """All its tokens, with their log-probabilities."""
        beam: Beam | None = self
        found = []
        while beam is not None and beam.last is not None:
            found.append(beam.last)
            beam = beam.before
        return found[::-1]


class Beams:
    """The search for one request's answers."""

    def __init__(self, request: Request, limit: int) -> None:
        self.members: list[Sequence] = []  # one for each beam that goes on; all of the prompt's forks at first
        self.finished: list[Beam] = []  # answers, the best first; their score takes their length into account
        self._params = request.params
        self._stops = request.stop_ids
        self._longest = limit - len(request.prompt)
        self._offers: dict[Sequence, list[Beam]] = {}
        self._beams: dict[Sequence, Beam] = {}  # how each member came to where it is; at first only one is anywhere

    def offer(self, sequence: Sequence, scored: TokenLogprobs) -> bool:
        """A member's likeliest next tokens; whether all have offered theirs."""
        if not self._beams:
            self._beams[self.members[0]] = Beam(0.0, self.members[0])
        before = self._beams.get(sequence)
        self._offers[sequence] = [] if before is None else _continued(before, sequence, scored)
        return len(self._offers) == len(self.members)

    def withdraw(self) -> None:
        """The members yield: they will offer again."""
        self._offers.clear()

    def choose(self) -> list[Beam]:
        """The beams that go on, one for each of the first members; none: the search is over."""
        width = self._params.width
        offers = sorted((beam for each in self._offers.values() for beam in each), key=itemgetter(0), reverse=True)
        self._offers.clear()
        length = offers[0].length
        going: list[Beam] = []
        is_full = len(self.finished) == width
        for rank, beam in enumerate(offers[: self.alternatives * width]):
            if beam.token in self._stops or length == self._longest:
                # Those behind the first `width` are there to go on in the place of those that end.
                if rank < width and not (is_full and self._params.early_stopping is True):
                    self.finished.append(beam._replace(score=beam.score / length**self._params.length_penalty))
            elif len(going) < width:
                going.append(beam)
        self.finished = sorted(self.finished, key=itemgetter(0), reverse=True)[:width]
        if self._is_over(going, length):
            return []
        self._beams = dict(zip(self.members, going, strict=False))
        return going

    def answers(self) -> list[Event]:
        """The news of a search that is over: the best answers, token by token, as those of the first members."""
        events: list[Event] = []
        for rank, (member, beam) in enumerate(zip(self.members[: self._params.n], self.finished, strict=False)):
            member.index = rank
            trail = beam.trail
            member.tokens[member.prompt_length :] = (entry.token for entry in trail)
            events += (Event(member, entry.token, logprobs=entry) for entry in trail[:-1])
            reason = FinishReason.STOP if beam.token in self._stops else FinishReason.LENGTH
            events.append(Event(member, beam.token, reason, trail[-1]))
        return events

    @property
    def alternatives(self) -> int:
        """How many tokens a member offers, for each beam: enough to go on if all that end come first."""
        return 1 + max(1, len(self._stops))

    def _is_over(self, going: list[Beam], length: int) -> bool:
        params = self._params
        if not going:
            return True
        if len(self.finished) < params.width:
            return False
        if params.early_stopping is True:
            return True
        # What the best of those that go on could come to: at its present length or, where it never stops early and long
        # answers are favoured, at the greatest.
        reach = self._longest if params.early_stopping == "never" and params.length_penalty > 0 else length
        return bool(going[0].score / reach**params.length_penalty <= self.finished[-1].score)


def _continued(before: Beam, sequence: Sequence, scored: TokenLogprobs) -> list[Beam]:
    return [
        Beam(
            before.score + logprob,
            sequence,
            before.length + 1,
            TokenLogprobs(token, logprob, rank, scored.top),
            before,
        )
        for rank, (token, logprob) in enumerate(scored.top, 1)
    ]
