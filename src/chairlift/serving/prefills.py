"""Prefills: the prompts that an engine computes for other engines, and sends to them block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.core.plan import Event, StepPlan
from chairlift.core.prefix_node import packed
from chairlift.core.request import FinishReason, Phase
from chairlift.serving.link import Link
from chairlift.serving.messages import PREFILLED, AnswerUpdate, StepReport, Submit

if TYPE_CHECKING:
    from chairlift.cluster.kv_transfer.outgoing import Outgoing


class Prefills:
    """Requests of which no token is for a client: each gets one update, once its blocks are where they are needed."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._waiting: dict[str, tuple[Link, int]] = {}  # the HTTP process of each, and its key there
        self._cached: dict[str, int] = {}  # prompt tokens that were cached here

    @property
    def reader(self) -> int:
        """A descriptor that is readable when blocks have been read."""
        return self._outgoing.reader

    @property
    def sent(self) -> int:
        """Blocks sent so far."""
        return self._outgoing.sent

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    def begin(self, name: str, link: Link, order: Submit) -> None:
        """Send the blocks of a submitted prompt as they are computed."""
        self._waiting[name] = link, order.key
        self._outgoing.begin(name, order.send_to, order.salt, packed(order.prompt))

    def stepped(self, plan: StepPlan) -> None:
        """Send the blocks that a finished step has completed; called before it is applied, which may free them."""
        if not self._waiting:
            return
        for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts, strict=True):
            name = sequence.request.id
            if name in self._waiting and sequence.phase is Phase.RUNNING:
                self._cached.setdefault(name, sequence.cached)
                self._outgoing.computed(name, sequence.tables[0].blocks, start + count)

    def ended(self, event: Event) -> None:
        """Handle the end of a request in the engine."""
        name = event.sequence.request.id
        if event.finish_reason is FinishReason.LENGTH:
            self._outgoing.finish(name)
            return
        self._outgoing.abort(name)
        self._report(name, event.finish_reason or FinishReason.ERROR, event.error)

    def abort(self, name: str) -> None:
        """Forget a request."""
        if self._waiting.pop(name, None) is not None:
            self._cached.pop(name, None)
            self._outgoing.abort(name)

    def report(self) -> None:
        """Report the requests with blocks that their receivers have read."""
        for name in self._outgoing.take_done():
            self._report(name, PREFILLED)

    def _report(self, name: str, reason: str, error: str | None = None) -> None:
        link, key = self._waiting.pop(name)
        cached = self._cached.pop(name, 0)
        link.keys.pop(key, None)
        link.send(StepReport([AnswerUpdate(key, 0, finish_reason=str(reason), cached=cached, error=error)]))
