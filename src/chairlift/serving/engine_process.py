"""The engine's own process: orders in, steps, news out.

It is started with one argument, a Job in JSON, and connects to a socket of each HTTP process. It ends when it is told
to, or when the process that started it is gone.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from chairlift.core.errors import ChairliftError, RequestError
from chairlift.core.explain import explain
from chairlift.core.plan import Event, Outcome, StepPlan
from chairlift.core.request import Request
from chairlift.core.step import TokenLogprobs
from chairlift.engine.engine import Engine
from chairlift.engine.garbage import freeze_loaded, postpone_full_collections
from chairlift.engine.loop import drive
from chairlift.serving import messages
from chairlift.serving.beat import PATIENCE, Beat
from chairlift.serving.link import Link
from chairlift.serving.messages import Batch, Broken, Hello, News, PromptScores, Scored, Stats, Submit

log = logging.getLogger("chairlift")

FAULT = 4  # exit code of an engine whose device fails
_COLLECT_EVERY = 600.0  # seconds after which a full garbage collection is due even if requests run
IDLE_MS = 400  # an idle engine shows itself alive this often
_READERS_MS = 20  # between two looks whether HTTP processes that are behind have caught up


class Job(msgspec.Struct, frozen=True):
    """What the engine process is to do."""

    model: str
    settings: dict[str, Any]
    sockets: list[str]  # one for each HTTP process; the first also gets the statistics
    beat: int  # the descriptor of its memory
    parent: int  # the process without which it has no business
    progress: bool = False


class EngineLoop:
    """Drives an engine for HTTP processes."""

    def __init__(self, engine: Engine, hello: Hello, job: Job, slowest_step: float) -> None:
        self._engine = engine
        self._hello = hello
        self._beat = Beat(job.beat)
        self._patience = max(PATIENCE, 1.5 * slowest_step)
        self._parent = job.parent
        self._stats: Stats | None = None
        self._questions: deque[tuple[Link, messages.Explain]] = deque()  # each HTTP process bounds its own
        self._swapped_out = self._swapped_in = 0  # blocks
        self._last_collection, self._has_run = 0.0, True
        engine.on_step = self._count_swaps
        self._context: zmq.Context[Any] = zmq.Context()
        self._links = [Link(self._context, address) for address in job.sockets]
        self._poller = zmq.Poller()
        for link in self._links:
            link.register(self._poller)

    def run(self) -> None:
        """Serve until the parent process is gone, or until the engine cannot run another step."""
        postpone_full_collections()  # the prefix cache alone has tens of thousands of objects: 20 to 100 ms
        drive(self._engine, self)
        if self._engine.fault is not None:
            log.error("the engine process ends, to be started again: %s", self._engine.fault)
        for link in self._links:
            link.close()
        self._context.term()

    # ---- the engine's port

    def is_open(self) -> bool:
        """Whether there is a process to serve; also shows that the loop is alive."""
        self._beat.touch(self._engine.clock.now(), self._patience)
        return os.getppid() == self._parent

    def receive(self, wait: float) -> None:
        """Take the orders of all HTTP processes; with nothing to compute, wait for the next."""
        if wait:
            self._send_updates(Outcome())
            if not self._poller.poll(int(min(IDLE_MS, 1 + 1000 * wait))):
                self._collect_garbage(self._engine.clock.now())
        self._take_orders()
        self._answer_questions()
        if self._engine.has_work:
            self._wait_for_readers()

    def report(self, outcome: Outcome, seconds: float) -> None:
        """Send a step's updates."""
        # A step that took long shows how long one may take: the next such must not look like a standstill.
        self._patience = max(self._patience, 3 * seconds)
        # A plan that computes nothing is no step: a message for each would flood the HTTP process.
        self._send_updates(outcome, seconds if outcome or self._engine.last_tokens else 0.0)
        self._has_run = True
        now = self._engine.clock.now()
        if now - self._last_collection > _COLLECT_EVERY:
            self._collect_garbage(now)

    def _wait_for_readers(self) -> None:
        """Make no step while an HTTP process that reads is far behind: its unread news would fill the memory."""
        while any(link.is_behind(self._engine.clock.now()) for link in self._links):
            self._beat.touch(self._engine.clock.now(), self._patience)
            self._poller.poll(_READERS_MS)
            self._take_orders()

    def _collect_garbage(self, now: float) -> None:
        """Make a full collection, once after each time that requests have run; the next is of what is new since."""
        if not self._has_run:
            return
        self._has_run, self._last_collection = False, now
        if self._engine.has_work:
            gc.collect()
        else:
            freeze_loaded()

    # ---- orders in

    def _take_orders(self) -> None:
        for number, link in enumerate(self._links):
            for is_here in link.changes():
                if is_here:
                    link.begin()
                    link.send(self._hello)
                    self._stats = None
                else:
                    self._leave(link)
            for order in link.receive():
                match order:
                    case Submit():
                        self._submit(number, link, order)
                    case messages.Abort(key):
                        if key in link.keys:
                            self._engine.abort(link.keys.pop(key))
                    case messages.Stop(key, index):
                        if key in link.keys:
                            self._engine.stop_answer(link.keys[key], index)
                            if not self._engine.scheduler.is_live(link.keys[key]):
                                del link.keys[key]
                    case messages.Read(total):
                        link.has_read(total, self._engine.clock.now())
                    case messages.Explain():
                        self._questions.append((link, order))
                    case messages.ResetPrefixCache(question):
                        link.send(messages.PrefixCacheReset(question, self._engine.clear_prefix_cache()))

    def _submit(self, number: int, link: Link, order: Submit) -> None:
        name = f"{number}.{order.key}.{order.id}"
        try:
            self._engine.submit(as_request(name, order))
            link.keys[order.key] = name
        except RequestError as error:
            link.send(Batch([News(order.key, 0, finish_reason=messages.REFUSED, error=str(error))]))
        except Exception as error:  # a bug of ours: it must cost this request alone
            log.exception("a request could not be taken")
            link.send(messages.Unreadable(order.key, f"the engine could not take the request: {error}"))

    def _answer_questions(self) -> None:
        """One between two steps, so that nobody is slowed down by another's questions; all where no step is due."""
        while self._questions:
            self._explain(*self._questions.popleft())
            if self._engine.has_work and not self._engine.pause:
                return

    def _explain(self, link: Link, order: messages.Explain) -> None:
        def is_asked(request: Request) -> bool:
            if not request.id.endswith(order.id):  # which is quick, and true of few
                return False
            return request.id.split(".", 2)[2] == order.id and order.tenant in (None, request.tenant)

        found, unfinished = explain(self._engine.scheduler, is_asked, self._engine.clock.now())
        link.send(messages.Explained(order.question, found, unfinished))

    def _leave(self, link: Link) -> None:
        for name in link.keys.values():
            self._engine.abort(name)
        link.keys.clear()

    # ---- news out

    def _send_updates(self, outcome: Outcome, took: float = 0.0) -> None:
        news: dict[int, list[News]] = defaultdict(list)
        for event in outcome:
            number, key = address_of(event.sequence.request)
            if key in self._links[number].keys:  # else it was aborted, and nobody waits for its last event
                news[number].append(as_news(key, event))
        stats = self._measure(took)
        told: Stats | None = stats
        for number, link in enumerate(self._links):
            fresh = stats if number == 0 and (took or stats != self._stats) else None
            if not (news[number] or fresh is not None) or link.tell(news[number], fresh):
                continue
            told = None if number == 0 else told  # to be told again
            if link.keys:
                log.error("an HTTP process does not read its news: its %d requests are ended", len(link.keys))
                link.owe_end()
                self._leave(link)
        self._stats = told
        for event in outcome.events:
            if event.finish_reason is not None and not self._engine.scheduler.is_live(event.sequence.request.id):
                number, key = address_of(event.sequence.request)
                self._links[number].keys.pop(key, None)

    def _measure(self, took: float) -> Stats:
        scheduler = self._engine.scheduler
        count, pool, memory = scheduler.counters, scheduler.pool, scheduler.memory
        cache = memory.prefix_cache
        from_host, from_disk = (*(cache.returns if cache is not None else []), 0, 0)[:2]
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=pool.free,
            total_blocks=pool.total,
            submitted=count.submitted,
            finished=count.finished,
            aborted=count.aborted,
            rejected=count.rejected,
            failed=count.failed,
            preemptions=count.preemptions,
            step_seconds=took,
            step_tokens=self._engine.last_tokens if took else 0,
            blocked_by=scheduler.planner.blocked_by,
            swapped_out=self._swapped_out,
            swapped_in=self._swapped_in,
            cached_blocks=pool.cached,
            queried_tokens=0 if cache is None else count.prompt_tokens,
            cached_tokens=count.cached_tokens,
            evicted_blocks=0 if cache is None else cache.evictions,
            copied_blocks=memory.copied,
            from_host=from_host,
            from_disk=from_disk,
            correlation=scheduler.predictor.correlation,
            # As many as there are tenants with requests here: a copy, since the last one is compared with the next.
            service=scheduler.policy.service_of_tenants(),
            policy=scheduler.policy.stats(),
        )

    def _count_swaps(self, plan: StepPlan, begun: float, seconds: float) -> None:
        self._swapped_out += len(plan.saved)
        self._swapped_in += len(plan.restored)


def address_of(request: Request) -> tuple[int, int]:
    """From the name that it has here: which HTTP process it came from, and that one's number for it."""
    number, key, _ = request.id.split(".", 2)
    return int(number), int(key)


def as_request(name: str, order: Submit) -> Request:
    """Return an order as a request of the core."""
    return Request(
        id=name,
        prompt=order.prompt,
        params=order.params,
        arrival=order.arrival,
        seed=order.seed,
        eos_ids=frozenset(order.eos_ids),
        bad_words=tuple(map(tuple, order.bad_words)),
        tenant=order.tenant,
        weight=order.weight,
        priority=order.priority,
        deadline=order.deadline,
        salt=order.salt,
        endpoint=order.endpoint,
    )


def as_news(key: int, event: Event) -> News:
    """An event of the core, for the wire."""
    sequence = event.sequence
    # Beams have all their tokens before the first is told of.
    is_first = len(sequence.tokens) == sequence.prompt_length + 1 or sequence.is_search
    return News(
        key,
        sequence.index,
        event.token,
        None if event.finish_reason is None else event.finish_reason.value,
        sequence.started if is_first else None,
        sequence.cached if is_first else 0,
        None if event.logprobs is None else _scored(event.logprobs),
        None
        if event.prompt_logprobs is None
        else PromptScores(event.prompt_logprobs.start, msgspec.Raw(messages.encode(event.prompt_logprobs.entries))),
        event.error,
    )


def _scored(entry: TokenLogprobs) -> Scored:
    return Scored(entry.token, entry.logprob, entry.rank, msgspec.Raw(messages.encode(entry.top)))


def start(job: Job) -> tuple[Engine, Hello, float]:
    """Load the model: the engine, what it serves, and how long its slowest step may take."""
    from chairlift.core.settings import Settings
    from chairlift.execution.build import build

    built = build(job.model, Settings.of(**job.settings), progress=job.progress)
    limits, config = built.limits, built.config
    hello = Hello(
        model=job.model,
        device=str(built.device),
        dtype=str(config.dtype).removeprefix("torch."),
        max_sequences=limits.max_sequences,
        step_tokens=limits.step_tokens,
        max_length=limits.max_length,
        vocab_size=limits.vocab_size,
        block_size=built.capacity.block_size,
        kv_tokens=built.capacity.tokens,
        capacity=str(built.capacity),
        eos_ids=sorted(config.eos_ids),
    )
    return built.engine, hello, built.slowest_step


def main(build_engine: Callable[[Job], tuple[Engine, Hello, float]] = start) -> None:
    """Load, then serve; a model that cannot be loaded is told to the HTTP processes in one line."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # nothing to tidy up, and an exception could come anywhere
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the parent's to handle
    job = msgspec.json.decode(sys.argv[1], type=Job)
    try:
        engine, hello, slowest = build_engine(job)
    except ChairliftError as error:
        context: zmq.Context[Any] = zmq.Context()
        links = [Link(context, address) for address in job.sockets]
        deadline = time.monotonic() + 5
        while links and time.monotonic() < deadline:
            links = [link for link in links if not link.send(Broken(str(error)))]
            time.sleep(0.05)
        time.sleep(0.2)  # a message handed to ZeroMQ is not yet on its way, and LINGER is 0
        sys.exit(3)
    EngineLoop(engine, hello, job, slowest).run()
    if engine.fault is not None:
        sys.exit(FAULT)


if __name__ == "__main__":
    main()
