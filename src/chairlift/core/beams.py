"""Beam search: the likeliest answers as a whole, among those that a fixed number of beams reaches.

Beams are forks of one prompt. In every round each beam has candidates, its likeliest next tokens. The best candidates
of all beams are continued, each as a fork of its beam, and those that end are kept as answers. The choices and the end
of the search are those of transformers, so that both give the same answers.

Candidates that are not chosen cost nothing: those of all beams are merged only as far as needed, twice the number of
beams.
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


class Beams(Group):
    """The search for one request's answers: a group with one member for each beam."""

    is_search = True

    def __init__(self, first: Sequence, limit: int) -> None:
        super().__init__(first)
        request = first.request
        self.finished: list[Beam] = []  # answers, the best first; their score takes their length into account
        self._params = request.params
        self._stops = request.stop_ids
        self._longest = limit - len(request.prompt)
        self._candidates: dict[Sequence, Candidates] = {}
        self._beams: dict[Sequence, Beam] = {}  # how each member came to where it is; at first only one is anywhere

    def add_candidates(self, sequence: Sequence, candidates: Candidates) -> bool:
        """Take a member's likeliest next tokens; whether all have offered theirs."""
        if not self._beams:
            self._beams[self.members[0]] = Beam(0.0, self.members[0])
        self._candidates[sequence] = candidates
        return len(self._candidates) == len(self.members)

    def drop_candidates(self) -> None:
        """Drop this round's candidates: the members are preempted, and compute them again."""
        self._candidates.clear()

    def choose(self) -> list[Beam]:
        """The beams that go on, one for each of the first members; none: the search is over."""
        params, width = self._params, self._params.width
        length = 1 + next(iter(self._beams.values())).length
        is_last = length == self._longest
        if len(self.finished) < width or params.early_stopping is not True:
            # An answer ends only among the best `width`; others then go on in the place of those that end.
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

    def _best(self, count: int, *, with_stops: bool) -> list[Beam]:
        """The best of what the members offer, tokens that end an answer among them or not."""
        offered = (
            self._continued(before, sequence, self._candidates[sequence], with_stops)
            for sequence, before in self._beams.items()
        )
        return list(islice(merge(*offered, key=itemgetter(0), reverse=True), count))

    def _continued(self, before: Beam, member: Sequence, offer: Candidates, with_stops: bool) -> Iterator[Beam]:
        """The ways on from a beam, the best first, each made when it is asked for."""
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
        # What the best of those that go on could come to: at its present length or, where it never stops early and long
        # answers are favoured, at the greatest.
        reach = self._longest if params.early_stopping == "never" and params.length_penalty > 0 else length
        return bool(going[0].score / reach**params.length_penalty <= self.finished[-1].score)
