"""The seam for scheduling policies: admission order, lanes, and the victims of preemption. policies.py has them all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from chairlift.core.cost import Cost
from chairlift.core.predictor import Predictor
from chairlift.core.request import Sequence

Lane = Hashable


@dataclass(frozen=True, slots=True)
class Knowledge:
    """The parts and settings that a policy may be built on."""

    predictor: Predictor
    cost: Cost
    max_sequences: int
    aging: float | None = None  # what a second of waiting is worth; None: the policy's own default


def _none(sequence: Sequence) -> int:
    return 0


class Policy:
    """First come, first served, and the methods that other policies override.

    Waiting sequences are in lanes; most policies have one. In a lane the smallest key is admitted first, and of equal
    keys the one that arrived first.
    """

    name = "fcfs"
    is_in_order = False  # whether a later request is never admitted before an earlier one
    needs_lengths = False  # whether it reads `sequence.expected`
    reads_cache = False  # whether its keys change with the content of the prefix cache
    is_preemptive = False  # whether running sequences may be preempted for a waiting one
    fills_by_lane = False  # whether a closed batch (static, dynamic) is made of one lane

    def __init__(self, known: Knowledge | None = None) -> None:
        """Read the parts and settings that it needs."""

    def key(self, sequence: Sequence) -> float:
        """Return its sort key in its lane and in the batch; called once when it is queued."""
        return 0.0

    def lane(self, sequence: Sequence, now: float) -> Lane:
        """Return its lane; called again when it is first there, so it may have to change."""
        return None

    def choose(self, heads: Mapping[Lane, Sequence], now: float) -> Lane:
        """Return the lane to admit from next, of those given with their first sequence; there is at least one."""
        return next(iter(heads))

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """Return the sequence to preempt when memory is short; `candidates` is not empty and in rank order."""
        return candidates[-1]

    def victim_for(self, newcomer: Sequence, running: list[Sequence]) -> Sequence | None:
        """Return the sequence to preempt for a waiting one that does not fit, if any; `running` is in rank order."""
        return None

    def arrange(self, prompts: list[Sequence]) -> list[Sequence]:
        """Return the order in which prompts in prefill get the tokens that decodes leave; they come in rank order."""
        return prompts

    # ---- what it shows

    def explain(self, sequence: Sequence, waiting: Iterable[Sequence], now: float) -> str:
        """Return in words where a waiting sequence is in the order, and why. This must not change anything."""
        return "requests are admitted in order of arrival"

    def stats(self) -> dict[str, float]:
        """Return numbers of its own to show among the engine's metrics, by name."""
        return {}

    def service_of_tenants(self) -> dict[str, float]:
        """Return the tokens that each tenant with live requests was served, where it counts them."""
        return {}

    # ---- its inputs

    cached: Callable[[Sequence], int] = staticmethod(_none)  # tokens of a waiting sequence in the prefix cache
    peek_cached: Callable[[Sequence], int] = staticmethod(_none)  # the same without keeping the path: for `explain`

    def arrived(self, sequence: Sequence) -> None:
        """Note that it is queued for the first time."""

    def started(self, sequence: Sequence) -> None:
        """Note that it is in the batch."""

    def stopped(self, sequence: Sequence) -> None:
        """Note that it is not in the batch any more: it has ended, or it was preempted."""

    def ended(self, sequence: Sequence) -> None:
        """Note that it has ended; after `stopped`, if it was in the batch."""
