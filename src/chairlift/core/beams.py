"""Beam search: the likeliest whole answers that a fixed number of beams finds.

Beams are forks of one prompt. In every round each beam has candidates, its likeliest next tokens. The best candidates
of all beams become the next beams, each a fork of its parent, and candidates that end are kept as answers. The choices
and the end of the search equal those of transformers, so that both return the same answers.

Candidates are merged only as far as needed, up to twice the number of beams; the others cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from chairlift.core.plan import Event
from chairlift.core.request import FinishReason, Group, Sequence
from chairlift.core.step import Candidates, TokenLogprobs


class Beam(NamedTuple):
    """A partial answer: its score, its last token, and the beam that it extends."""

    score: float
    parent: Sequence
    length: int = 0
    last: TokenLogprobs | None = None
    before: Beam | None = None

    @property
    def token(self) -> int:
        """The last token."""
        assert self.last is not None, "no token has been chosen yet"
        return self.last.token

    @property
    def trail(self) -> list[TokenLogprobs]:
        """All tokens, with their log-probabilities."""
        beam: Beam | None = self
        found = []
        while beam is not None and beam.last is not None:
            found.append(beam.last)
            beam = beam.before
        return found[::-1]


class Beams(Group):
    """The beam search of one request: a group with one member per beam."""

    is_search = True

    def __init__(self, first: Sequence, limit: int) -> None:
        super().__init__(first)
        request = first.request
        self.finished: list[Beam] = []  # answers, the best first, by score with length penalty
        self._params = request.params
        self._stops = request.stop_ids
        self._longest = limit - len(request.prompt)
        self._candidates: dict[Sequence, Candidates] = {}
        self._beams: dict[Sequence, Beam] = {}  # each member's beam; in the first round one member has one

    def add_candidates(self, sequence: Sequence, candidates: Candidates) -> bool:
        """Store a member's likeliest next tokens; return whether all members have theirs."""
        if not self._beams:
            self._beams[self.members[0]] = Beam(0.0, self.members[0])
        self._candidates[sequence] = candidates
        return len(self._candidates) == len(self.members)

    def drop_candidates(self) -> None:
        """Drop this round's candidates: the members are preempted and compute them again."""
        self._candidates.clear()

    def choose(self) -> list[Beam]:
        """Return the next beams, one for each of the first members; none: the search is over."""
        params, width = self._params, self._params.width
        length = 1 + next(iter(self._beams.values())).length
        is_last = length == self._longest
        if len(self.finished) < width or params.early_stopping is not True:
            # Only the best `width` candidates can end an answer; the next best replace those that end.
            best = self._best(width, with_stops=True)
            ended = (beam for beam in best if is_last or beam.token in self._stops)
            self.finished += (beam._replace(score=beam.score / length**params.length_penalty) for beam in ended)
            self.finished = sorted(self.finished, key=itemgetter(0), reverse=True)[:width]
        going = [] if is_last else self._best(width, with_stops=False)
        self._candidates.clear()
        if self._is_over(going, length):
            return []
        self._beams = dict(zip(self.members, going, strict=False))
        return going

    def answers(self) -> list[Event]:
        """Return the events of a finished search: the best answers, token by token, as those of the first members."""
        events: list[Event] = []
        for rank, (member, beam) in enumerate(zip(self.members[: self._params.n], self.finished, strict=False)):
            member.index = rank
            trail = beam.trail
            member.tokens[member.prompt_length :] = (entry.token for entry in trail)
            events += (Event(member, entry.token, logprobs=entry) for entry in trail[:-1])
            reason = FinishReason.STOP if beam.token in self._stops else FinishReason.LENGTH
            events.append(Event(member, beam.token, reason, trail[-1]))
        return events

    def _best(self, count: int, *, with_stops: bool) -> list[Beam]:
        """Return the best candidates of all members, with or without stop tokens."""
        offered = (
            self._continued(before, sequence, self._candidates[sequence], with_stops)
            for sequence, before in self._beams.items()
        )
        return list(islice(merge(*offered, key=itemgetter(0), reverse=True), count))

    def _continued(self, before: Beam, member: Sequence, offer: Candidates, with_stops: bool) -> Iterator[Beam]:
        """Yield the extensions of a beam, the best first."""
        for rank, (token, logprob) in enumerate(zip(offer.tokens, offer.logprobs, strict=True), 1):
            if with_stops or token not in self._stops:
                last = TokenLogprobs(token, logprob, rank, offer.top)
                yield Beam(before.score + logprob, member, before.length + 1, last, before)

    def _is_over(self, going: list[Beam], length: int) -> bool:
        params = self._params
        if not going:
            return True
        if len(self.finished) < params.width:
            return False
        if params.early_stopping is True:
            return True
        # The best score that a running beam can reach: at its present length or, if the search never stops early and
        # favours long answers, at the greatest.
        reach = self._longest if params.early_stopping == "never" and params.length_penalty > 0 else length
        return bool(going[0].score / reach**params.length_penalty <= self.finished[-1].score)
