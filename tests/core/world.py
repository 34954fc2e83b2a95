"""A small world to drive at random: the real engine and scheduler over the fake executor, watched at every event.

An event is one of: a request submitted (or refused), an abort, a stop, a failure of the executor, a slice planned, a
token applied. Tokens that are discarded because their sequence ended before they came are not counted, nor are steps.
After every call that changes the scheduler, its `check()` runs and everything promised below is asserted.

No request starves under fcfs, and this is the proof that the world asserts. Order sequences by arrival. The youngest
is preempted and the oldest is admitted, so the running ones are always older than the waiting ones; hence the oldest of
all runs in every plan, and as first in the batch it may take the memory of all others, so it is never preempted again.
In each plan it decodes a token, or computes of its prompt what the decodes of the other rows leave: at least
c = step_tokens - max_sequences + 1 tokens, or half as many where others check drafts. So a sequence with a prompt of P
tokens that may grow to L is the oldest for at most D = ceil(P / c) + (L - P) - 1 plans, and one more when steps
overlap, since its last token is then seen a plan later. (Having been preempted with some of its answer only shortens
this: that part is recomputed c tokens a plan.)
A request is therefore admitted within 1 + sum(D) plans over the sequences before it, and ended within sum(D) over those
and its own. With one row and one token a step the bound is exact (see test_properties).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from struct import unpack
from typing import Any

from device import GARBAGE, FakeExecutor, mark_in
from fakes import VOCAB, ManualClock, answer_to, beams_to, first_mark, mark_after, marks_of
from watched import WatchedScheduler, blocks_of

from chairlift.core.assemble import parts
from chairlift.core.blocks import BlockPool
from chairlift.core.cache_groups import CacheGroups
from chairlift.core.cost import Cost
from chairlift.core.drafting import DeviceDrafter, Drafter, Proposal
from chairlift.core.errors import RequestError
from chairlift.core.exchange import Arrived
from chairlift.core.explain import MOST, explain, explain_head
from chairlift.core.limits import Limits
from chairlift.core.ngram import NgramDrafter
from chairlift.core.params import SamplingParams
from chairlift.core.plan import Event
from chairlift.core.prefix_cache import DISK, PrefixCache
from chairlift.core.prefix_node import Node, packed
from chairlift.core.request import FinishReason, Phase, Request, Sequence
from chairlift.core.settings import SchedulingSettings
from chairlift.core.speculation import Speculation
from chairlift.core.step_times import StepTimes
from chairlift.engine.engine import Engine

_ASKS = 5  # plans after which what is said of all requests is read
GIVEN_UP = "the client's time is up"  # the error of some aborts


@dataclass(frozen=True)
class Shape:
    """How small the world is."""

    seats: int
    step_tokens: int
    block_size: int
    blocks: int
    max_length: int
    overlap: bool
    host_blocks: int = 0
    caches: bool = False
    disk_blocks: int = 0
    sent_blocks: int = 0  # slots outside the pool for evicted blocks
    windows: tuple[int, ...] = (0,)  # of each group of layers

    def turns(self, prompt: int, limit: int, has_drafts: bool) -> int:
        """D: how many plans a sequence can be the oldest for."""
        share = self.step_tokens - self.seats + 1
        share = (share + 1) // 2 if has_drafts else share
        return -(-prompt // share) + limit - prompt - 1 + self.overlap


@dataclass(eq=False)
class Record:
    """What one request must get, and what it has got so far."""

    request: Request
    answers: list[tuple[list[int], FinishReason]]
    turns: int  # how many plans each of its sequences can be the oldest for
    seated_by: int  # the plan in which it has a seat at the latest
    ended_by: int  # the plan after which it has ended at the latest
    received: list[int] = field(default_factory=list)  # how many tokens of each answer
    scored: dict[int, int] = field(default_factory=dict)  # scores that came for tokens of the prompt, by position
    ended: dict[int, FinishReason] = field(default_factory=dict)

    @property
    def sequences_left(self) -> int:
        return len(self.answers) - len(self.ended)

    @property
    def is_at_error(self) -> bool:
        """Whether the next token of one of its sequences cannot be chosen, or its constraint fails."""
        answers = zip(self.answers, self.received, strict=True)
        return any(reason is FinishReason.ERROR and came == len(tokens) for (tokens, reason), came in answers)


class RandomDrafter(Drafter):
    """Drafts that are right for a while, by chance."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.known: set[Sequence] = set()

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        self.known.add(sequence)
        return Proposal(self._world.draft(sequence, most), sequence.index % 2)

    def ended(self, sequence: Sequence) -> None:
        assert sequence.is_done
        self.known.discard(sequence)


class World:
    """Submits, aborts, stops, breaks and steps; and holds every answer against what the model says alone."""

    def __init__(
        self,
        shape: Shape,
        settings: SchedulingSettings | None = None,
        *,
        beams: bool = False,
        drafts: Random | None = None,
    ) -> None:
        self.shape = shape
        self._random = drafts  # of drafts, some right and some wrong; None: there are no drafts
        self.speculation: Speculation | None = None
        self.beams = beams  # whether requests may be for beams, of which what is promised of fcfs does not hold
        limits = Limits(shape.seats, shape.step_tokens, shape.max_length, VOCAB)
        host = BlockPool(shape.host_blocks, shape.block_size)
        pool = BlockPool(shape.blocks, shape.block_size)
        chosen = settings or SchedulingSettings()
        disk = BlockPool(shape.disk_blocks, shape.block_size)
        groups = CacheGroups(shape.windows, shape.block_size, shape.step_tokens)
        cache = PrefixCache(pool, (host, disk), Cost(), groups) if shape.caches else None
        self.scheduler = WatchedScheduler(
            limits, pool, **parts(chosen, limits, host, Cost()), prefix_cache=cache, windows=shape.windows
        )
        self.scheduler.is_fcfs = settings is None and not beams
        if drafts is not None:
            # A larger step takes longer or not: so many drafts pay, or few.
            points = [(1, 1.0), (shape.step_tokens + 1, 1.0 + drafts.choice((0.0, 0.5, 4.0)))]
            drafter: Drafter = drafts.choice((RandomDrafter(self), NgramDrafter(), DeviceDrafter()))
            passes = StepTimes([(1, 0.1)]) if drafter.is_on_device else None
            self.speculation = Speculation(drafter, StepTimes(points), draft_times=passes)
            self.speculation.fixed = drafts.choice((None, None, 3))
            self.scheduler.planner.speculation = self.speculation
        self.searches = 0  # requests for beams that were let in
        self.executor = FakeExecutor(
            shape.seats,
            shape.blocks,
            shape.block_size,
            shape.max_length,
            shape.host_blocks,
            shape.disk_blocks,
            shape.windows,
            drafts,
        )
        if cache is not None:
            cache.is_sound = self._is_sound
        self.exchange = self.scheduler.memory.prefixes.exchange
        self.exchange.free.extend(range(shape.sent_blocks))
        self.arrivals = self.departures = 0  # blocks
        self.clock = ManualClock()
        self.engine = Engine(self.scheduler, self.executor, self.clock, overlap=shape.overlap)
        self.live: dict[str, Record] = {}
        self.speaking: dict[tuple[str, int], Sequence] = {}  # live sequences that have tokens already
        self.submitted = 0
        self.refused = 0
        self.heard: list[list[int]] = []  # prompts and their answers, as far as they came: others may begin with them

    @property
    def events(self) -> int:
        return self.scheduler.events

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        """Tokens that may come next: the first ones right, others not."""
        assert self._random is not None
        assert not sequence.in_flight and not sequence.is_search, f"{sequence} has nothing to draft behind"
        record = self.live[sequence.request.id]
        tokens = record.answers[sequence.index][0] if sequence.index < len(record.answers) else []
        count = self._random.randint(0, most)
        right = tokens[len(sequence.output) :][: self._random.randint(0, count)]
        return [*right, *self._random.choices(range(VOCAB), k=count - len(right))]

    def _predicted(self, request: Request) -> tuple[int, ...]:
        """What a client may expect of the answer: some of it is right."""
        assert self._random is not None
        if self._random.random() < 0.7:
            return ()
        answer, _ = answer_to(request, 0, self.shape.max_length)
        return tuple(token if self._random.random() < 0.8 else 0 for token in answer)

    # ---- what can happen

    def submit(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int | None,
        eos: int,
        seed: int,
        sampling: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Ask for something that may be impossible: then it must be refused, and nothing else."""
        shape = self.shape
        params = SamplingParams(n=n, max_tokens=max_tokens, **(sampling or {}))
        n = params.width
        request = Request(
            f"r{self.submitted}",
            prompt,
            params,
            arrival=self.clock.now(),
            seed=seed,
            eos_ids=frozenset(range(eos)),
            **more,
        )
        if self._random is not None and 0 < len(prompt) < shape.max_length:
            request = replace(request, prediction=self._predicted(request))
        self.submitted += 1
        is_possible = 0 < len(prompt) < shape.max_length and n <= shape.seats
        limit = shape.max_length if max_tokens is None else min(shape.max_length, len(prompt) + max_tokens)
        if params.use_beam_search:
            is_possible = is_possible and n * self.scheduler.memory.groups.blocks_of(limit) <= shape.blocks
        try:
            self.engine.submit(request)
        except RequestError:
            assert not is_possible, f"{len(prompt)} tokens and n={n} should fit {shape}"
            self.refused += 1
            return
        assert is_possible, f"{len(prompt)} tokens and n={n} should not fit {shape}"
        turns = shape.turns(len(prompt), limit, self._random is not None)
        ahead = self.scheduler.plans + sum(record.turns * record.sequences_left for record in self.live.values())
        answers = [answer_to(request, index, limit) for index in range(n)]
        if params.use_beam_search:
            answers, turns = (
                beams_to(request, limit),
                n * (turns + limit),
            )  # each token is chosen before the next begins
            self.searches += 1
        self.live[request.id] = Record(request, answers, turns, ahead + 1, ahead + turns * n, [0] * n)

    def abort(self, request_id: str, error: str | None = None) -> None:
        """End a request, or none if it has ended: what it held is free at once, and it is heard of no more."""
        record = self.live.get(request_id)
        if request_id in {event.sequence.request.id for event in self.engine._late}:
            assert not self.engine.abort(request_id), "it has ended, and the next step says so"
            return
        self._read(self.engine.abort(request_id, error))
        assert request_id not in self.live
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        assert record is None or reason in record.ended.values()

    def stop(self, key: tuple[str, int]) -> None:
        """End one sequence that has tokens already, as the text side does on a stop string."""
        sequence, record = self.speaking[key], self.live[key[0]]
        if sequence.is_done:
            assert not self.engine.stop(sequence), "it has ended, and the next step says so"
            return
        self._read(self.engine.stop(sequence))
        assert record.ended[key[1]] is FinishReason.STOP
        assert not blocks_of(sequence)

    def arrive(self, tokens: list[int], salt: str, first: int) -> None:
        """Bring the blocks of some tokens from another process, from number `first` on."""
        size = self.shape.block_size
        count = len(tokens) // size
        marks = [mark_in(mark, 0) for mark in marks_of(tokens, salt)]
        slots = range(self.arrivals, self.arrivals + count - first)
        for number, slot in enumerate(slots, first):
            self.executor.incoming[slot] = marks[number * size : (number + 1) * size]
        self.arrivals += len(slots)
        if slots:
            self.exchange.arrived.append(Arrived(salt, packed(tokens[: count * size]), first, slots))

    def _watch_exchange(self) -> None:
        """Slots are given back once, and what has left is what it says."""
        for slot in self.exchange.read:
            del self.executor.incoming[slot]
        self.exchange.read.clear()
        for salt, key, slot in self.exchange.written:
            tokens = list(unpack(f"{len(key) // 4}i", key))
            marks = [mark_in(mark, 0) for mark in marks_of(tokens, salt)[-self.shape.block_size :]]
            assert self.executor.outgoing.pop(slot) == marks, f"slot {slot} does not hold {tokens} of {salt!r}"
            self.exchange.free.append(slot)
            self.departures += 1
        self.exchange.written.clear()

    def break_next(self, at_submit: bool, at_choose: bool = False) -> None:
        """Let the executor fail in the next pass that it starts, that it is sent masks for, or that it collects."""
        if at_submit:
            self.executor.breaks_at_submit = True
        elif at_choose:
            self.executor.breaks_at_choose = True
        else:
            self.executor.breaks_at_collect = True

    def damage_disk(self, random: Random) -> None:
        """Damage a block on disk: no sequence may start with it."""
        if self.executor.disk:
            slot = random.randrange(len(self.executor.disk))
            self.executor.disk[slot] = [GARBAGE] * self.shape.block_size

    def _is_sound(self, slot: int) -> bool:
        return self.executor.disk[slot] != [GARBAGE] * self.shape.block_size

    def step(self) -> None:
        """One step of the engine; all it says must be true, and in time."""
        self.engine._failed_steps = 0  # here passes break by chance, and however many in a row the next may succeed
        events = self.engine.step()
        self._verify_cache()
        self._watch_exchange()
        self._watch_progress()
        plans = self.scheduler.plans
        for sequence in self.scheduler.newcomers if self.scheduler.is_fcfs else ():
            record = self.live[sequence.request.id]
            assert plans <= record.seated_by, f"{sequence} sat down in plan {plans}, not by {record.seated_by}"
        self._read(events)
        if plans % _ASKS == 0:
            self._verify_explained()
        for record in self.live.values() if self.scheduler.is_fcfs else ():
            assert plans < record.ended_by, f"{record} has not ended by plan {record.ended_by}"

    def _verify_cache(self) -> None:
        """Whatever can be found is what it says, on the device and on every shelf, and so is what was swapped out.

        While a broken pass has not been collected, only what no pass in flight has touched.
        """
        device = self.executor
        may_be_wrong = device.is_doubtful
        for salt, tokens, marks, node in nodes_of(self.scheduler.memory.prefix_cache):
            if may_be_wrong and not node.is_ready:
                continue
            for group, block in enumerate((node.block, *node.others)):
                own = [mark_in(mark, group) for mark in marks]
                assert block < 0 or device.read_block(block) == own, f"block {block} does not hold {tokens} of {salt!r}"
            if node.shelf >= 0:
                held = (device.host, device.disk)[node.shelf][node.slot]
                is_damaged = node.shelf == DISK and not self._is_sound(node.slot)
                assert is_damaged or held == marks, (
                    f"slot {node.slot} of shelf {node.shelf} does not hold {tokens} of {salt!r}"
                )
        for sequence in () if may_be_wrong else self.scheduler.waiting:
            self._verify_saved(sequence)

    def _verify_saved(self, sequence: Sequence) -> None:
        """What is swapped out is all that the next token of a sequence attends to."""
        size, computed = self.shape.block_size, sequence.computed
        marks = marks_of(sequence.tokens[:computed], sequence.request.salt)
        assert sequence.saved or not computed
        for group, (saved, window) in enumerate(zip(sequence.saved, self.shape.windows, strict=False)):
            for at in range(max(0, computed - window + 1) if window else 0, computed):
                assert at // size >= saved.freed, f"{sequence} lost KV"
                held = self.executor.host[saved.blocks[at // size]][at % size]
                assert held == mark_in(marks[at], group), f"{sequence} lost KV"

    def _verify_explained(self) -> None:
        """What is said of each answer agrees with what came of it."""
        scheduler, now = self.scheduler, self.clock.now()
        told, count = explain(scheduler, lambda _: True, now)
        assert count == len(scheduler.running) + len(scheduler.waiting) and len(told) == min(count, MOST)
        waiting = len({each.request.id for each in scheduler.waiting})
        found = [*told, *(standing for _, standing in explain_head(scheduler, MOST, now))]
        for each in found:
            assert 0 <= each.computed_tokens <= each.prompt_tokens + each.generated_tokens
            assert (each.ahead is None) == (each.state == "running") and each.waiting == waiting
            if match := re.search(r"It runs: (\d+) of (\d+) tokens", each.why[0]):
                assert int(match[1]) <= int(match[2]), each.why
            if match := re.search(r"Of (\d+) draft tokens? checked for it, (\d+) were", " ".join(each.why)):
                assert int(match[2]) <= int(match[1]), each.why

    def _watch_progress(self) -> None:
        """Requests that are here and neither wait for a batch to fill nor for a pass in flight must be computed.

        A plan may do no more than preempt, but the next one computes: the engine never has to end a stuck request.
        """
        assert self.engine._idle_plans <= 1, (
            f"nothing is computed any more: {self.scheduler.running} {[*self.scheduler.waiting]}"
        )

    def drain(self) -> None:
        """Step until nothing is left: under fcfs the bound on waiting makes sure that this ends, else a count."""
        self.engine.end_input()
        left = 1000 + 10 * sum(record.turns * record.sequences_left for record in self.live.values())
        while self.engine.has_work:
            self.step()
            self.clock.time += 0.01
            left -= 1
            assert left, f"{self.live} never ended"
        scheduler, pool = self.scheduler, self.scheduler.pool
        assert not self.live, "requests were lost"
        assert not self.speaking
        assert not scheduler.yielded, "preempted sequences never came back"
        drafter = self.speculation and self.speculation.drafter
        assert not (isinstance(drafter, RandomDrafter) and drafter.known), "the drafter was not told of ends"
        assert not (isinstance(drafter, NgramDrafter) and drafter._texts), "texts of ended sequences are kept"
        assert pool.available == pool.total
        scheduler.memory.preemption.check([])  # nothing is left in host memory
        assert not self.executor.incoming, "slots of arrived blocks were not given back"
        assert sorted(self.exchange.free) == list(range(self.shape.sent_blocks)), "slots of evicted blocks are lost"
        assert scheduler.counters.submitted == self.submitted
        assert scheduler.counters.rejected == self.refused

    # ---- what is heard of it

    def _read(self, events: Iterable[Event]) -> None:
        for event in events:
            sequence = event.sequence
            key = sequence.request.id, sequence.index
            record = self.live.get(sequence.request.id)
            if sequence.is_search and (record is None or sequence.index >= len(record.answers)):
                self.scheduler.yielded.discard(sequence)
                continue  # one of more beams than there are answers ends with its request
            assert record is not None, f"{sequence} was heard of after its request's end"
            if event.prompt_logprobs is not None:
                start, entries = event.prompt_logprobs
                record.scored |= {start + i: entry.token for i, entry in enumerate(entries)}
                continue
            tokens, reason = record.answers[sequence.index]
            assert sequence.index not in record.ended, f"{sequence} was heard of after its end"
            if event.token is not None:
                place = record.received[sequence.index]
                assert event.token == tokens[place], (
                    f"token {place} of {sequence} is {event.token}, not {tokens[place]}"
                )
                record.received[sequence.index] = place + 1
                self.speaking[key] = sequence
                if record.request.params.prompt_logprobs is not None:
                    assert record.scored == dict(enumerate(record.request.prompt[1:], 1)), (
                        "not all were scored, or wrong"
                    )
                assert (event.logprobs is None) == (record.request.scored is None)
                natural = reason if place + 1 == len(tokens) and reason is not FinishReason.ERROR else None
                assert event.finish_reason is natural, f"{sequence} said {event.finish_reason}, not {natural}"
            if event.finish_reason is not None:
                self._read_end(event, record)

    def _read_end(self, event: Event, record: Record) -> None:
        sequence, reason = event.sequence, event.finish_reason
        assert reason is not None
        assert sequence.phase is Phase.DONE
        is_search = sequence.is_search
        received = record.received[sequence.index]
        assert sequence.output == record.answers[sequence.index][0][:received] or (is_search and not received)
        if sequence in self.scheduler.yielded:
            # It ended while it waited: with a token, only if that was in flight when it yielded.
            assert event.token is None or self.shape.overlap
            self.scheduler.yielded.discard(sequence)
        record.ended[sequence.index] = reason
        self.heard = [*self.heard[-7:], list(sequence.tokens)]
        self.speaking.pop((sequence.request.id, sequence.index), None)
        if reason in (FinishReason.ABORT, FinishReason.ERROR) and (not sequence.is_forked or is_search):
            record.ended |= dict.fromkeys(range(len(record.answers)), reason)  # siblings that were never born
        assert (reason is FinishReason.ERROR) == (event.error is not None)
        if event.error is not None and not event.error.startswith(("the step failed", GIVEN_UP)):
            assert record.is_at_error, f"{sequence} failed: {event.error}"
        if not record.sequences_left:
            del self.live[sequence.request.id]


def nodes_of(cache: PrefixCache | None) -> Iterator[tuple[str, list[int], list[int], Node]]:
    """Every node of the tree with its salt, all tokens up to its end, and what its own are in the cache."""
    roots = cache._roots.values() if cache is not None else ()
    stack = [(salt := root.chunk.decode(), list[int](), first_mark(salt), root) for root in roots]
    while stack:
        salt, before, mark, node = stack.pop()
        for child in node.children.values():
            own = unpack(f"{len(child.chunk) // 4}i", child.chunk)
            marks = list(accumulate(own, mark_after, initial=mark))[1:]
            tokens = [*before, *own]
            stack.append((salt, tokens, marks[-1], child))
            yield salt, tokens, marks, child
