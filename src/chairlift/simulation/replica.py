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
from chairlift.core.errors import ChairliftError, RequestError
from chairlift.core.limits import Limits
from chairlift.core.params import SamplingParams
from chairlift.core.plan import StepPlan
from chairlift.core.prefix_cache import PrefixCache
from chairlift.core.request import FinishReason, Request
from chairlift.core.settings import Settings
from chairlift.costs.hardware import Chip, Shape, cost_of, kv_tokens
from chairlift.engine.engine import Engine
from chairlift.json_file import read_json
from chairlift.simulation.device import STOP, SimulatedDevice, VirtualClock
from chairlift.traffic.query import Query
from chairlift.traffic.traces import BLOCK_TOKENS

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

    @staticmethod
    def of(shape: Shape, chip: Chip, settings: Settings, ranks: int = 1) -> Hardware:
        """Return a model on chips, with the engine's own defaults for a GPU."""
        wanted, cache = settings.scheduling, settings.cache
        step_tokens, size = wanted.step_tokens or 8192, cache.block_size or 32
        room = cache.kv_tokens or kv_tokens(shape, chip, ranks, step_tokens)
        sequences = wanted.max_sequences or min(256, step_tokens)
        limits = Limits(sequences, step_tokens, min(shape.max_length, room), shape.vocabulary)
        overlap = True if wanted.overlap is None else wanted.overlap
        return Hardware(cost_of(shape, chip, ranks, size), limits, room, size, overlap, cache.host_tokens or 0)

    def plain(self) -> dict[str, Any]:
        """Return all numbers, for a file."""
        return asdict(self)

    @staticmethod
    def read(path: Path, settings: Settings) -> Hardware:
        """Read the hardware of a file of `chairlift profile`, with the limits that settings ask for."""
        try:
            found = read_json(path)["hardware"]
            cost, limits = Cost(**found.pop("cost")), Limits(**found.pop("limits"))
            made = Hardware(cost, limits, **found)
        except (KeyError, TypeError, AttributeError):
            raise ChairliftError(
                f"{path} has no step times: write it with `chairlift profile --out {path}` on the machine"
            ) from None
        wanted, cache = settings.scheduling, settings.cache
        limits = replace(
            limits,
            max_sequences=wanted.max_sequences or limits.max_sequences,
            step_tokens=wanted.step_tokens or limits.step_tokens,
        )
        overlap = made.overlap if wanted.overlap is None else wanted.overlap
        size, room = cache.block_size or made.block_size, cache.kv_tokens or made.kv_tokens
        return replace(made, limits=limits, kv_tokens=room, block_size=size, overlap=overlap)


@dataclass(slots=True)
class Life:
    """A request's times."""

    query: Query
    sent: float
    first: float = inf
    end: float = inf
    tokens: int = 0
    error: str | None = None


class Replica:
    """Runs requests on its own clock."""

    def __init__(self, hardware: Hardware, settings: Settings, on_end: Callable[[Life], None]) -> None:
        self.clock = VirtualClock()
        self.limits = replace(hardware.limits, vocab_size=_IDS)
        size = hardware.block_size
        pool, host = (BlockPool(-(-tokens // size), size) for tokens in (hardware.kv_tokens, hardware.host_tokens))
        known = PrefixCache(pool, (host, BlockPool(0, size)), hardware.cost) if settings.cache.prefix_cache else None
        self.device = SimulatedDevice(hardware.cost, self.clock, self.limits.max_sequences)
        # The scheduler's own copy: it learns from the steps that it sees, as in service.
        scheduler = assemble_scheduler(settings.scheduling, self.limits, pool, host, replace(hardware.cost), known)
        self.engine = Engine(scheduler, self.device, self.clock, overlap=hardware.overlap)
        self.engine.on_step = self._see
        self.on_step: Callable[[StepPlan, float, float], None] | None = None
        self._on_end = on_end
        self._lives: dict[str, Life] = {}
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
        life = Life(query, query.at)
        if not self.engine.has_work:
            self.clock.reach(query.at)
        request = make_request(number, query, self.limits)
        try:
            self.engine.submit(request)
        except RequestError as error:
            life.end, life.error = query.at, str(error)
            self._on_end(life)
            return
        self._lives[request.id] = life

    def step(self) -> None:
        """Run one step, and end the requests that are complete."""
        if (pause := self.engine.pause) not in (0.0, inf):
            self.clock.reach(self.clock.now() + pause)
        outcome = self.engine.step()
        for event in outcome.events:
            if event.finish_reason is not None:
                self._end(event.sequence.request.id, event.finish_reason, len(event.sequence.tokens), event.error)

    def _see(self, plan: StepPlan, begun: float, seconds: float) -> None:
        """Note the first tokens of a collected step."""
        self._unstarted.update(each.request.id for each in plan.placed if len(each.tokens) == each.prompt_length)
        if self._unstarted:
            now = self.clock.now()
            for sequence in plan.samples:
                id = sequence.request.id
                if id in self._unstarted:
                    self._unstarted.discard(id)
                    if (life := self._lives.get(id)) is not None:  # None: it ended while this step was in flight
                        life.first = min(life.first, now)
        if self.on_step is not None:
            self.on_step(plan, begun, seconds)

    def _end(self, id: str, reason: FinishReason, tokens: int, error: str | None) -> None:
        self._unstarted.discard(id)
        life = self._lives.pop(id, None)
        if life is None:
            return
        life.end, life.tokens = self.clock.now(), tokens - life.query.prompt_tokens
        life.error = error or (None if reason is not FinishReason.ERROR else "failed")
        self._on_end(life)


def make_request(number: int, query: Query, limits: Limits) -> Request:
    """Return a request with token ids that name contents: equal ids where the trace has equal prompts."""
    length = query.prompt_tokens
    if isinstance(query.prompt, list):
        prompt = query.prompt
    elif query.blocks:
        prompt = []
        for block in query.blocks:
            prompt += [block % _OWN] * BLOCK_TOKENS
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
    )
