"""A simulated replica: the real engine and scheduler over a simulated device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from chairlift.core.assemble import assemble_scheduler
from chairlift.core.blocks import BlockPool
from chairlift.core.cost import Cost
from chairlift.core.errors import ChairliftError, ModelError, RequestError
from chairlift.core.exchange import Arrived
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.plan import StepPlan
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.prefix_node import packed
from chairlift.core.request import FinishReason, Request
from chairlift.core.settings import Settings
from chairlift.costs.hardware import Chip, Shape, cost_of, kv_tokens
from chairlift.engine.engine import Engine
from chairlift.json_file import read_json
from chairlift.simulation.device import STOP, SimulatedDevice, VirtualClock
from chairlift.traffic.query import Query

_IDS = 1 << 30  # token ids are names of contents here, not entries of a vocabulary
_OWN = 1 << 29  # ids from here on name a request's own content


@dataclass(frozen=True, slots=True)
class Hardware:
    """The device of a replica: step times, limits and KV capacity."""

    cost: Cost
    limits: Limits
    kv_tokens: int
    block_size: int
    overlap: bool
    host_tokens: int = 0
    kv_bytes: int = 0  # of a token in all layers, for transfers between engines
    link: float = 25e9  # bytes a second between two engines
    wake: float = 0.0  # seconds that the first step after an idle time takes longer

    @staticmethod
    def of(shape: Shape, chip: Chip, settings: Settings, ranks: int = 1) -> Hardware:
        """Return a model on chips, with the engine's own defaults for a GPU."""
        wanted, cache = settings.scheduling, settings.cache
        step_tokens, size = wanted.step_tokens or 8192, cache.block_size or 32
        room = cache.kv_tokens or kv_tokens(shape, chip, ranks, step_tokens)
        sequences = wanted.max_sequences or min(256, step_tokens)
        limits = Limits(sequences, step_tokens, min(shape.max_length, room), shape.vocabulary)
        overlap = True if wanted.overlap is None else wanted.overlap
        cost, host = cost_of(shape, chip, ranks, size), cache.host_tokens or 0
        return Hardware(cost, limits, room, size, overlap, host, shape.kv_bytes, chip.host)

    def plain(self) -> dict[str, Any]:
        """Return all numbers, for a file."""
        return asdict(self)

    @staticmethod
    def read(path: Path, settings: Settings) -> Hardware:
        """Read the hardware of a file of `chairlift profile`, with the limits that settings ask for."""
        try:
            found = read_json(path)["hardware"]
            numbers = found.pop("cost")
            numbers["curve"] = tuple((tokens, seconds) for tokens, seconds in numbers.get("curve", ()))
            cost, limits = Cost(**numbers), Limits(**found.pop("limits"))
            made = Hardware(cost, limits, **found)
        except (ModelError, KeyError, TypeError, ValueError, AttributeError):
            what = f"{path} has no step times" if path.exists() else f"there is no file {path}"
            raise ChairliftError(f"{what}: write it with `chairlift profile --out {path}` on the machine") from None
        wanted, cache = settings.scheduling, settings.cache
        room = cache.kv_tokens or made.kv_tokens
        limits = replace(
            limits,
            max_sequences=wanted.max_sequences or limits.max_sequences,
            step_tokens=wanted.step_tokens or limits.step_tokens,
            max_length=min(limits.max_length, room),
        )
        overlap = made.overlap if wanted.overlap is None else wanted.overlap
        host = made.host_tokens if cache.host_tokens is None else cache.host_tokens
        size = cache.block_size or made.block_size
        return replace(made, limits=limits, kv_tokens=room, block_size=size, overlap=overlap, host_tokens=host)


@dataclass(slots=True)
class Life:
    """A request's times."""

    number: int
    query: Query
    sent: float
    started: float = inf  # the beginning of its first step
    first: float = inf
    end: float = inf
    tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class Prompt:
    """A prompt that a replica computes for another one: `send` gets the blocks as they are computed."""

    number: int
    query: Query
    send: Callable[[int], None]  # called with the tokens computed so far
    done: Callable[[bool], None]  # called at the end, with whether it was computed


class Replica:
    """Runs requests on its own clock."""

    def __init__(self, hardware: Hardware, settings: Settings, on_end: Callable[[Life], None]) -> None:
        self.clock = VirtualClock()
        self.limits = replace(hardware.limits, vocab_size=_IDS)
        size = hardware.block_size
        pool, host = (BlockPool(-(-tokens // size), size) for tokens in (hardware.kv_tokens, hardware.host_tokens))
        known = PrefixCache(pool, (host, BlockPool(0, size)), hardware.cost) if settings.cache.prefix_cache else None
        self.device = SimulatedDevice(hardware.cost, self.clock, self.limits.max_sequences, hardware.wake)
        # The scheduler's own copy: it learns from the steps that it sees, as in service, and has no measured curve.
        own = replace(hardware.cost, curve=())
        scheduler = assemble_scheduler(settings.scheduling, self.limits, pool, host, own, known)
        self.engine = Engine(scheduler, self.device, self.clock, overlap=hardware.overlap)
        self.engine.on_step = self._see
        self.on_step: Callable[[StepPlan, float, float], None] | None = None
        self.on_first: Callable[[Life], None] = lambda life: None  # called at a request's first token
        self.on_idle: Callable[[float], None] = lambda until: None  # called at an arrival that ends an idle time
        self._on_end = on_end
        self._lives: dict[str, Life] = {}
        self._prompts: dict[str, Prompt] = {}  # for other replicas
        self._unstarted: set[str] = set()  # requests in the batch without a token

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended or a step is in flight."""
        return self.engine.has_work

    @property
    def ready_at(self) -> float:
        """When it can compute again; inf: not before another request."""
        return self.clock.now() + self.engine.pause if self.engine.has_work else inf

    @property
    def waiting(self) -> int:
        """The number of sequences that wait."""
        return len(self.engine.scheduler.waiting)

    @property
    def running(self) -> int:
        """The number of sequences in the batch."""
        return len(self.engine.scheduler.running)

    def submit(self, number: int, query: Query) -> None:
        """Queue a request at its arrival; one that can never run ends at once."""
        self.receive(Life(number, query, query.at), query.at)

    def receive(self, life: Life, now: float, prefilled: int = 0) -> None:
        """Queue a request that arrives at `now`; another replica has computed `prefilled` of its prompt tokens."""
        self._wake(now)
        request = make_request(life.number, life.query, self.limits, prefilled)
        try:
            self.engine.submit(request)
        except RequestError as error:
            life.end, life.error = now, error.for_clients
            self._on_end(life)
            return
        self._lives[request.id] = life

    def compute(self, prompt: Prompt) -> None:
        """Queue a prompt that is computed for another replica, padded to whole blocks as in the server."""
        query = prompt.query
        self._wake(query.at)
        filler = -query.prompt_tokens % self.engine.scheduler.pool.block_size
        request = make_request(prompt.number, replace(query, output_tokens=1), self.limits)
        if query.prompt_tokens + filler < self.limits.max_length:
            request.prompt.extend([0] * filler)
        try:
            self.engine.submit(request)
        except RequestError:
            prompt.done(False)
            return
        self._prompts[request.id] = prompt

    def take_in(self, number: int, query: Query, blocks: range) -> None:
        """Let the next step copy blocks of a prompt into the pool, where the prefix cache finds them."""
        size = self.engine.scheduler.pool.block_size
        tokens = make_request(number, query, self.limits).prompt[: blocks.stop * size]
        tokens += [0] * (blocks.stop * size - len(tokens))
        self.engine.scheduler.memory.prefixes.exchange.arrived.append(Arrived("", packed(tokens), blocks.start, blocks))

    def step(self, moment: float) -> None:
        """Run one step at the moment at which it is ready, and end the requests that are complete."""
        self.clock.reach(moment)
        outcome = self.engine.step()
        for event in outcome.events:
            if event.finish_reason is not None:
                self._end(event.sequence.request.id, event.finish_reason, len(event.sequence.tokens), event.error)

    def _wake(self, now: float) -> None:
        """Advance the clock of an idle replica to an arrival."""
        if not self.engine.has_work:
            self.clock.reach(now)
            self.on_idle(self.clock.now())

    def _see(self, plan: StepPlan, begun: float, seconds: float) -> None:
        """Note the requests that a collected step began, and their first tokens."""
        for each in plan.placed:
            if len(each.tokens) == each.prompt_length:
                self._unstarted.add(each.request.id)
                if (life := self._lives.get(each.request.id)) is not None:
                    life.started = min(life.started, begun)
        if self._unstarted:
            now = self.clock.now()
            for sequence in plan.samples:
                id = sequence.request.id
                if id in self._unstarted:
                    self._unstarted.discard(id)
                    if (life := self._lives.get(id)) is not None:  # None: it ended while this step was in flight
                        life.first = min(life.first, now)
                        self.on_first(life)
        if self._prompts:
            self._send(plan)
        if self.on_step is not None:
            self.on_step(plan, begun, seconds)

    def _send(self, plan: StepPlan) -> None:
        """Send the blocks that a step has computed for other replicas."""
        for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts, strict=True):
            prompt = self._prompts.get(sequence.request.id)
            if prompt is not None:
                prompt.send(start + count)

    def _end(self, id: str, reason: FinishReason, tokens: int, error: str | None) -> None:
        self._unstarted.discard(id)
        if (prompt := self._prompts.pop(id, None)) is not None:
            prompt.done(reason is FinishReason.LENGTH or reason is FinishReason.STOP)
            return
        life = self._lives.pop(id, None)
        if life is None:
            return
        life.end, life.tokens = self.clock.now(), tokens - life.query.prompt_tokens
        life.error = error or (None if reason is not FinishReason.ERROR else "failed")
        self._on_end(life)


def make_request(number: int, query: Query, limits: Limits, prefilled: int = 0) -> Request:
    """Return a request with token ids that name contents: equal ids where the trace has equal prompts."""
    length = query.prompt_tokens
    if isinstance(query.prompt, list):
        prompt = query.prompt
    elif query.blocks:
        prompt = []
        for block in query.blocks:
            prompt += [block % _OWN] * query.block_tokens
        prompt = prompt[:length] + [_OWN + number % _OWN] * (length - len(prompt))
    else:
        prompt = [_OWN + number % _OWN] * length
    most = max(1, min(query.output_tokens, limits.max_length - length))
    params = SamplingParams(max_tokens=None, stop_token_ids=[STOP], ignore_eos=True, temperature=0)
    return Request(
        str(number),
        prompt,
        params,
        arrival=query.at,
        seed=most,
        tenant=query.tenant,
        endpoint=query.endpoint,
        priority=query.priority,
        deadline=None if query.deadline is None else query.at + query.deadline,
        known_length=most,
        prefilled=prefilled,
    )
