"""The engine process: it receives orders, runs steps and sends updates.

It is started with one argument, a Job in JSON, and connects to a socket of each HTTP process. It ends on SIGTERM, or
when its parent process has ended.
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

from chairlift.core.constraint import Constraint, Reasoning
from chairlift.core.errors import ChairliftError, RequestError
from chairlift.core.explain import explain
from chairlift.core.plan import Outcome, StepPlan
from chairlift.core.request import Request
from chairlift.engine.engine import Engine
from chairlift.engine.garbage import freeze_loaded, postpone_full_collections
from chairlift.engine.loop import drive
from chairlift.serving import messages
from chairlift.serving.beat import PATIENCE, Beat
from chairlift.serving.compiling import Compiler
from chairlift.serving.core_messages import address_of, as_request, as_update, stats_of
from chairlift.serving.engine_start import BlockEnds, Job, Started, start
from chairlift.serving.fetching import Fetching, Waiting
from chairlift.serving.link import Link
from chairlift.serving.messages import AnswerUpdate, Broken, Hello, Stats, StepReport, Submit
from chairlift.serving.prefills import Prefills
from chairlift.serving.watching import Watching

log = logging.getLogger("chairlift")

FAULT = 4  # exit code of an engine after its device has failed
_COLLECT_EVERY = 600.0  # seconds between full garbage collections while requests run
IDLE_MS = 400  # between two heartbeats of an idle engine
_TOKEN_SECONDS = 2e-5  # to compute a prompt's token, before any has been computed
_READERS_MS = 20  # between two checks of HTTP processes that are behind


class EngineLoop:
    """Drives an engine for HTTP processes."""

    def __init__(
        self,
        engine: Engine,
        hello: Hello,
        job: Job,
        slowest_step: float,
        compiler: Compiler | None = None,
        blocks: BlockEnds | None = None,
    ) -> None:
        self._engine = engine
        self._compiler = compiler
        self._compiling: dict[str, tuple[Link, Submit]] = {}  # requests by id, while their grammars are compiled
        self._hello = hello
        self._beat = Beat(job.beat)
        self._patience = max(PATIENCE, 1.5 * slowest_step)
        self._parent = job.parent
        self._stats: Stats | None = None
        self._questions: deque[tuple[Link, messages.Explain]] = deque()  # bounded by each HTTP process
        self._watching = Watching(engine, lambda request: request.id.split(".", 2)[2])
        self._swapped_out = self._swapped_in = 0  # blocks
        self._last_collection, self._has_run = 0.0, True
        engine.on_step = self._stepped
        self._context: zmq.Context[Any] = zmq.Context()
        self._links = [Link(self._context, address) for address in job.sockets]
        self._poller = zmq.Poller()
        for link in self._links:
            link.register(self._poller)
        if compiler is not None:
            self._poller.register(compiler.reader, zmq.POLLIN)
        self._blocks = blocks
        self._prefills = None if blocks is None or blocks.outgoing is None else Prefills(blocks.outgoing)
        if self._prefills is not None:
            self._poller.register(self._prefills.reader, zmq.POLLIN)
        for each in () if blocks is None else blocks.incoming:
            self._poller.register(each.reader, zmq.POLLIN)
        self._fetching: Fetching | None = None
        if blocks is not None and blocks.store is not None:
            guess = max(slowest_step / hello.step_tokens, _TOKEN_SECONDS)
            self._fetching = Fetching(blocks.store, engine.scheduler, guess)
            self._poller.register(self._fetching.reader, zmq.POLLIN)

    def run(self) -> None:
        """Serve until the parent process ends, or until the engine cannot run another step."""
        postpone_full_collections()  # 20 to 100 ms: the prefix cache alone has tens of thousands of objects
        drive(self._engine, self)
        if self._engine.fault is not None:
            log.error("the engine process ends and will be restarted: %s", self._engine.fault)
        if self._compiler is not None:
            self._compiler.close()
        for link in self._links:
            link.close()
        self._context.term()

    # ---- called by `drive`

    def is_open(self) -> bool:
        """Whether the parent process runs; also writes the heartbeat."""
        self._beat.touch(self._engine.clock.now(), self._patience)
        return os.getppid() == self._parent

    def receive(self, wait: float) -> None:
        """Handle the orders of all HTTP processes; with nothing to compute, wait up to `wait` seconds for one."""
        if self._blocks is not None and self._exchange_blocks(self._blocks):
            wait = 0.0  # a request was submitted
        if wait:
            self._send_updates(Outcome())
            if self._fetching is not None and self._fetching.wait is not None:
                wait = min(wait, self._fetching.wait)
            if not self._poller.poll(int(min(IDLE_MS, 1 + 1000 * wait))):
                self._collect_garbage(self._engine.clock.now())
            for each in () if self._blocks is None else self._blocks.incoming:
                each.hear()
        self._take_orders()
        self._answer_questions()
        self._watching.send(self._engine.clock.now())
        if self._engine.has_work:
            self._wait_for_readers()

    def report(self, outcome: Outcome, seconds: float) -> None:
        """Send a step's updates."""
        if self._engine.fault is None:  # else this step has hung, and the silence since it began must count as such
            self._patience = max(self._patience, 3 * seconds)  # a step as long as this one must not count as stuck
        # A plan that computes nothing is not reported: one message each would flood the HTTP process.
        self._send_updates(outcome, seconds if outcome or self._engine.last_tokens else 0.0)
        self._has_run = True
        now = self._engine.clock.now()
        if now - self._last_collection > _COLLECT_EVERY:
            self._collect_garbage(now)

    def _exchange_blocks(self, blocks: BlockEnds) -> bool:
        """Free the slots that steps have read, and report the prompts with blocks that were read elsewhere.

        Submit the requests that have waited for blocks of the store; return whether there are any.
        """
        exchange = self._engine.scheduler.memory.prefixes.exchange
        if exchange.read:
            read, exchange.read = exchange.read, []
            blocks.exchange.free(read)
        if self._prefills is not None:
            self._prefills.report()
        ready = [] if self._fetching is None else self._fetching.settle()
        for each in ready:
            self._submit_now(*each)
        return bool(ready)

    def _wait_for_readers(self) -> None:
        """Run no step while an HTTP process that reads is far behind: unread updates would fill the memory."""
        while any(link.is_behind(self._engine.clock.now()) for link in self._links):
            self._beat.touch(self._engine.clock.now(), self._patience)
            self._poller.poll(_READERS_MS)
            self._take_orders()

    def _collect_garbage(self, now: float) -> None:
        """Run a full collection, if requests have run since the last one."""
        if not self._has_run:
            return
        self._has_run, self._last_collection = False, now
        if self._engine.has_work:
            gc.collect()
        else:
            freeze_loaded()

    # ---- handling orders

    def _take_orders(self) -> None:
        if self._compiling:
            self._take_compiled()
        for number, link in enumerate(self._links):
            for is_connected in link.changes():
                if is_connected:
                    link.begin()
                    link.send(self._hello)
                    self._stats = None
                else:
                    self._abort_all(link)
            for order in link.receive():
                match order:
                    case Submit():
                        self._submit(number, link, order)
                    case messages.Abort(key):
                        if key in link.keys:
                            self._abort(link.keys.pop(key))
                    case messages.Stop(key, index):
                        if key in link.keys and link.keys[key] not in self._compiling:
                            self._engine.stop_answer(link.keys[key], index)
                            if not self._engine.scheduler.is_live(link.keys[key]):
                                del link.keys[key]
                    case messages.Read(total):
                        link.has_read(total, self._engine.clock.now())
                    case messages.Explain():
                        self._questions.append((link, order))
                    case messages.Watch():
                        self._watching.renew(link, order, self._engine.clock.now())
                    case messages.ResetPrefixCache(question):
                        link.send(messages.PrefixCacheReset(question, self._engine.clear_prefix_cache()))

    def _submit(self, number: int, link: Link, order: Submit) -> None:
        name = f"{number}.{order.key}.{order.id}"
        constraint = None
        if order.grammar:
            if self._compiler is None:
                self._refuse(link, order, "this engine has no tokenizer, which structured output needs")
                return
            constraint = self._compiler.cached(order.grammar)
            if constraint is None:
                link.keys[order.key] = name
                self._compiling[name] = link, order
                self._compiler.start(name, order.grammar)
                return
        self._submit_request(link, name, order, constraint)

    def _take_compiled(self) -> None:
        """Submit requests with their compiled grammars; requests aborted in between are not found."""
        for name, found in self._compiler.take() if self._compiler is not None else ():
            link, order = self._compiling.pop(name, (None, None))
            if link is None or order is None:
                continue
            if isinstance(found, Exception):
                link.keys.pop(order.key, None)
                self._refuse(link, order, str(found))
            else:
                self._submit_request(link, name, order, found)

    def _refuse(self, link: Link, order: Submit, reason: str) -> None:
        link.send(StepReport([AnswerUpdate(order.key, 0, finish_reason=messages.REFUSED, error=reason)]))

    def _submit_request(self, link: Link, name: str, order: Submit, constraint: Constraint | None) -> None:
        if order.thinking is not None:
            constraint = Reasoning(order.thinking, constraint)
        if self._fetching is not None and self._fetching.begin(Waiting(link, name, order, constraint)):
            link.keys[order.key] = name
            return
        self._submit_now(link, name, order, constraint)

    def _submit_now(self, link: Link, name: str, order: Submit, constraint: Constraint | None) -> None:
        try:
            self._engine.submit(as_request(name, order, constraint))
            link.keys[order.key] = name
            if order.send_to and self._prefills is not None:
                self._prefills.begin(name, link, order)
        except RequestError as error:
            link.keys.pop(order.key, None)
            self._refuse(link, order, str(error))
        except Exception as error:  # a bug here must fail only this request
            log.exception("a request could not be submitted")
            link.keys.pop(order.key, None)
            link.send(messages.Unreadable(order.key, f"the engine could not accept the request: {error}"))

    def _answer_questions(self) -> None:
        """Answer one question per step, so that questions do not slow requests down; all if no step is due."""
        while self._questions:
            self._explain(*self._questions.popleft())
            if self._engine.has_work and not self._engine.pause:
                return

    def _explain(self, link: Link, order: messages.Explain) -> None:
        def is_asked(request: Request) -> bool:
            if not request.id.endswith(order.id):  # a cheap test that few pass
                return False
            return request.id.split(".", 2)[2] == order.id and order.tenant in (None, request.tenant)

        found, unfinished = explain(self._engine.scheduler, is_asked, self._engine.clock.now())
        link.send(messages.Explained(order.question, found, unfinished))

    def _abort_all(self, link: Link) -> None:
        for name in link.keys.values():
            self._abort(name)
        link.keys.clear()

    def _abort(self, name: str) -> None:
        self._compiling.pop(name, None)
        self._engine.abort(name)
        if self._prefills is not None:
            self._prefills.abort(name)
        if self._fetching is not None:
            self._fetching.abort(name)

    # ---- sending updates

    def _send_updates(self, outcome: Outcome, took: float = 0.0) -> None:
        updates: dict[int, list[AnswerUpdate]] = defaultdict(list)
        for event in outcome:
            number, key = address_of(event.sequence.request)
            if self._prefills is not None and event.sequence.request.id in self._prefills:
                continue
            if key in self._links[number].keys:  # else it was aborted and its listener dropped
                updates[number].append(as_update(key, event))
        sent_blocks = sum(each.sent for each in (self._prefills, self._fetching) if each is not None)
        stats = stats_of(self._engine, took, (self._swapped_out, self._swapped_in), sent_blocks)
        sent: Stats | None = stats
        for number, link in enumerate(self._links):
            new_stats = stats if number == 0 and (took or stats != self._stats) else None
            if not (updates[number] or new_stats is not None) or link.send_updates(updates[number], new_stats):
                continue
            sent = None if number == 0 else sent  # the first process did not get them: send them again
            if link.keys:
                log.error("an HTTP process does not read its updates: its %d requests are aborted", len(link.keys))
                link.send_ends_later()
                self._abort_all(link)
        self._stats = sent
        for event in outcome.events:
            if event.finish_reason is None:
                continue
            if self._prefills is not None and event.sequence.request.id in self._prefills:
                self._prefills.ended(event)
            elif not self._engine.scheduler.is_live(event.sequence.request.id):
                number, key = address_of(event.sequence.request)
                self._links[number].keys.pop(key, None)

    def _stepped(self, plan: StepPlan, begun: float, seconds: float) -> None:
        self._swapped_out += len(plan.saved)
        self._swapped_in += len(plan.restored)
        if self._prefills is not None:
            self._prefills.stepped(plan)
        if self._fetching is not None:
            self._fetching.stepped(plan, seconds)


def main(build_engine: Callable[[Job], Started] = start) -> None:
    """Load the model, then serve; a loading error is sent to the HTTP processes as one line."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # nothing to clean up, and an exception could hit any code
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    job = msgspec.json.decode(sys.argv[1], type=Job)
    try:
        started = build_engine(job)
    except ChairliftError as error:
        context: zmq.Context[Any] = zmq.Context()
        links = [Link(context, address) for address in job.sockets]
        deadline = time.monotonic() + 5
        while links and time.monotonic() < deadline:
            links = [link for link in links if not link.send(Broken(str(error)))]
            time.sleep(0.05)
        time.sleep(0.2)  # ZeroMQ sends in the background, and LINGER is 0
        sys.exit(3)
    EngineLoop(started.engine, started.hello, job, started.slowest_step, started.compiler, started.blocks).run()
    if started.engine.fault is not None:
        sys.exit(FAULT)


if __name__ == "__main__":
    main()
