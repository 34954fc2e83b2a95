"""Fleet: the engines of one model as one, which the requests of an HTTP process are routed among.

A request that loses its engine before its first token is sent to another engine; after that it gets an error, because
its client may have read a part of the answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from chairlift.routing.policies import Ask
from chairlift.routing.prefixes import chain_of_tokens
from chairlift.routing.router import Route, Router
from chairlift.serving import messages
from chairlift.serving.engine_client import EngineClient, Listener
from chairlift.serving.messages import AnswerUpdate, Explained, Hello

log = logging.getLogger("chairlift")
T = TypeVar("T")

# Engines that a request may be sent to. A request that ends every engine it is sent to must not end them all.
ATTEMPTS = 3


class Placement:
    """A request at an engine. It listens until the first update, then the request's own listener does."""

    __slots__ = ("ask", "client", "fleet", "listener", "order", "route", "tried")

    def __init__(self, fleet: Fleet, order: messages.Submit, listener: Listener, ask: Ask) -> None:
        self.fleet, self.order, self.listener, self.ask = fleet, order, listener, ask
        self.tried: list[str] = []
        self.route: Route | None = None
        self.client: EngineClient | None = None

    def take(self, update: AnswerUpdate) -> None:
        """Handle the first update: the request stays at this engine."""
        assert self.route is not None and self.client is not None
        self.route.started()
        self.client.listen(self.order.key, self.listener)
        self.listener.take(update)

    def lose(self, message: str) -> None:
        """Send the request to another engine, if there is one."""
        self.fleet.move(self, message)

    def fail(self, message: str) -> None:
        """Handle a request that could not be decoded."""
        self.listener.fail(message)


class Fleet:
    """The engines of one model, by name; all have the same limits."""

    def __init__(
        self,
        clients: Mapping[str, EngineClient],
        router: Router | None = None,
        on_move: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.clients = clients
        self.router = router or Router(clients)
        self._on_move = on_move
        self._is_closed = False
        self._placements: dict[int, Placement] = {}
        self._next = secrets.randbits(40)  # random: updates meant for an earlier process on this socket match no key

    async def open(self) -> None:
        """Bind the sockets."""
        for client in self.clients.values():
            await client.open()

    async def close(self) -> None:
        """Fail all pending requests and close the sockets."""
        self._is_closed = True
        for client in self.clients.values():
            await client.close()

    # ---- state

    @property
    def hello(self) -> Hello | None:
        """The limits of the engines; None while none is connected."""
        return next((client.hello for client in self.clients.values() if client.hello is not None), None)

    @property
    def trouble(self) -> str | None:
        """The reason why requests cannot be served now; None if any engine works."""
        troubles = [client.trouble for client in self.clients.values()]
        return None if None in troubles else troubles[0]

    @property
    def live(self) -> int:
        """Number of this process's requests in the engines."""
        return len(self._placements)

    @property
    def questions(self) -> int:
        """Number of questions that an engine has not answered."""
        return max(client.questions for client in self.clients.values())

    def replicas(self) -> dict[str, str]:
        """Return the state of each engine: ok, or its trouble."""
        return {str(place): client.trouble or "ok" for place, client in enumerate(self.clients.values())}

    # ---- requests

    def new_key(self) -> int:
        """Return a new number for a request."""
        self._next += 1
        return self._next

    def submit(self, order: messages.Submit, listener: Listener, session: str = "") -> None:
        """Send a request to an engine; its updates go to the listener until `forget` or `abort`."""
        # With one engine there is nothing to choose, and hashing would only cost time.
        chain = chain_of_tokens(order.prompt, order.salt) if len(self.clients) > 1 else ()
        placement = Placement(self, order, listener, Ask(len(order.prompt), chain, session))
        self._placements[order.key] = placement
        self._place(placement, self.trouble or "no engine accepts requests")

    def _place(self, placement: Placement, message: str) -> None:
        """Route a request to an engine that works and was not tried; if there is none, it is lost."""
        down = [name for name, client in self.clients.items() if client.trouble is not None]
        route = None
        if len(placement.tried) < ATTEMPTS and not self._is_closed:
            route = self.router.route(placement.ask, {*down, *placement.tried})
        if route is None:
            self._placements.pop(placement.order.key, None)
            placement.listener.lose(message)
            return
        if placement.tried:
            self._on_move(placement.tried[-1])
        placement.tried.append(route.name)
        placement.route, placement.client = route, self.clients[route.name]
        placement.client.submit(placement.order, placement)

    def move(self, placement: Placement, message: str) -> None:
        """Handle the loss of an engine by a request without a token."""
        assert placement.route is not None
        placement.route.end("failed")
        self._place(placement, message)

    def stop(self, key: int, index: int) -> None:
        """End one answer of a request."""
        placement = self._placements.get(key)
        if placement is not None and placement.client is not None:
            placement.client.stop(key, index)

    def abort(self, key: int) -> None:
        """Abort a request at its engine; its listener gets no further update."""
        placement = self._placements.pop(key, None)
        if placement is not None and placement.client is not None and placement.route is not None:
            placement.client.abort(key)
            placement.route.end("aborted")

    def forget(self, key: int) -> None:
        """Drop the listener of a finished request."""
        placement = self._placements.pop(key, None)
        if placement is not None and placement.client is not None and placement.route is not None:
            placement.client.forget(key)
            placement.route.end("finished")

    # ---- questions

    async def explain(self, name: str, tenant: str | None) -> Explained | None:
        """Return the state of a request at whichever engine has it; None if an engine does not answer in time."""
        answers = await self._ask_all(lambda client: client.explain(name, tenant))
        found = [answer for answer in answers if answer is not None]
        if len(found) < len(answers) and not any(answer.answers for answer in found):
            return None
        return max(found, key=lambda answer: answer.unfinished, default=None)

    async def reset_prefix_cache(self) -> int | None:
        """Clear the prefix caches; return the number of blocks, or None if an engine does not answer in time."""
        answers = await self._ask_all(EngineClient.reset_prefix_cache)
        for name in self.clients:
            self.router.forget(name)
        counts = [answer for answer in answers if answer is not None]
        return sum(counts) if counts and len(counts) == len(answers) else None

    async def _ask_all(self, question: Callable[[EngineClient], Awaitable[T]]) -> Sequence[T]:
        working = [client for client in self.clients.values() if client.trouble is None]
        return await asyncio.gather(*(question(client) for client in working))
