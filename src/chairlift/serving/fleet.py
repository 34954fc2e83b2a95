"""Fleet: the engines of one model as one, which the requests of an HTTP process are routed among.

A request that loses its engine before its first token is sent to another engine; after that it gets an error, because
its client may have read a part of the answer.

If prompts are computed by other engines than answers, a request's prompt goes to one of those first, with the address
of the engine that will decode it. When that one has the prompt's blocks, the request goes there, as if it had found
them in its cache. Whatever happens before that, the request can go there, too: what is missing is computed there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from chairlift.core.params import SamplingParams
from chairlift.routing.policies import Ask
from chairlift.routing.pools import Pools
from chairlift.routing.prefixes import chain_of_tokens
from chairlift.routing.router import End, Route, Router
from chairlift.serving import messages
from chairlift.serving.engine_client import EngineClient, Listener
from chairlift.serving.messages import AnswerUpdate, Explained, Hello

log = logging.getLogger("chairlift")
T = TypeVar("T")

# Engines that a request may be sent to. A request that ends every engine it is sent to must not end them all.
ATTEMPTS = 3


class Placement:
    """A request at an engine. It listens until the first update, then the request's own listener does."""

    __slots__ = ("ask", "client", "fleet", "listener", "order", "prefill", "prefill_tried", "route", "tried")

    def __init__(self, fleet: Fleet, order: messages.Submit, listener: Listener, ask: Ask) -> None:
        self.fleet, self.order, self.listener, self.ask = fleet, order, listener, ask
        self.tried: list[str] = []
        self.route: Route | None = None
        self.client: EngineClient | None = None
        self.prefill: Route | None = None  # of the prompt, while another engine computes it
        self.prefill_tried: list[str] = []

    def take(self, update: AnswerUpdate) -> None:
        """Handle the first update: the request stays at this engine."""
        assert self.route is not None and self.client is not None
        self.route.started()
        self.client.listen(self.order.key, self.listener)
        self.listener.take(update)

    def end(self, how: End) -> None:
        """Record the end of the request, at the engines that have it."""
        for route in (self.prefill, self.route):
            if route is not None:
                route.end(how)
        self.prefill = None

    def lose(self, message: str) -> None:
        """Send the request to another engine, if there is one."""
        self.fleet.move(self, message)

    def fail(self, message: str) -> None:
        """Handle a request that could not be decoded."""
        self.listener.fail(message)


class Prefilling:
    """A prompt at an engine that computes it for another one."""

    __slots__ = ("_fleet", "_placement")

    def __init__(self, fleet: Fleet, placement: Placement) -> None:
        self._fleet, self._placement = fleet, placement

    def take(self, update: AnswerUpdate) -> None:
        """Handle the end: the engine that decodes the prompt has its blocks, or will compute them."""
        computed = max(0, len(self._placement.order.prompt) - update.cached)
        self._fleet.decode(self._placement, computed if update.finish_reason == messages.PREFILLED else 0)

    def lose(self, message: str) -> None:
        """Handle the loss of the engine: another one computes the prompt, or the one that decodes it."""
        self._fleet.prefill_again(self._placement)

    def fail(self, message: str) -> None:
        """Handle an order that could not be decoded."""
        self._fleet.decode(self._placement, 0)


class Fleet:
    """The engines of one model, by name; all have the same limits."""

    def __init__(
        self,
        clients: Mapping[str, EngineClient],
        router: Router | None = None,
        on_move: Callable[[str], None] = lambda name: None,
        pools: Pools | None = None,
        receives_at: Mapping[str, str] | None = None,
    ) -> None:
        self.clients = clients
        self.router = router or Router(clients)
        self.pools = pools or Pools(dict.fromkeys(clients, "both"))
        self._receives_at = receives_at or {}  # the address of each engine for KV blocks
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
        route = None
        if len(placement.tried) < ATTEMPTS and not self._is_closed:
            route = self.pools.decoding(placement.ask, self.router, {*self._down(), *placement.tried})
        if route is None:
            self._placements.pop(placement.order.key, None)
            placement.listener.lose(message)
            return
        if placement.tried:
            self._on_move(placement.tried[-1])
        placement.tried.append(route.name)
        placement.route = route
        self._prefill(placement)

    def _down(self) -> list[str]:
        return [name for name, client in self.clients.items() if client.trouble is not None]

    def _prefill(self, placement: Placement) -> None:
        """Send the prompt to an engine of the prefill pool, or the request to its engine if that computes it, too."""
        assert placement.route is not None
        down = {*self._down(), *placement.prefill_tried}
        address, route = self._receives_at.get(placement.route.name), None
        is_scored = placement.order.params.prompt_logprobs is not None  # its logits are needed where it is answered
        if address is not None and not is_scored and len(placement.prefill_tried) < ATTEMPTS:
            route = self.pools.prefilling(placement.ask, self.router, placement.route, down)
        if route is None or address is None:
            self.decode(placement, 0)
            return
        placement.prefill = route
        placement.prefill_tried.append(route.name)
        placement.client = self.clients[route.name]
        placement.client.submit(self._prompt_of(placement.order, address), Prefilling(self, placement))

    def _prompt_of(self, order: messages.Submit, address: str) -> messages.Submit:
        """Return the order of a prompt alone.

        It is filled up to a whole block: engines exchange whole blocks, and find the last one by its first tokens.
        """
        hello, prompt = self.hello, order.prompt
        filler = 0 if hello is None else -len(prompt) % hello.block_size
        if hello is not None and filler and len(prompt) + filler < hello.max_length:
            prompt = [*prompt, *[0] * filler]
        return messages.Submit(
            order.key,
            order.id,
            prompt,
            SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            arrival=order.arrival,
            tenant=order.tenant,
            weight=order.weight,
            priority=order.priority,
            deadline=order.deadline,
            endpoint=order.endpoint,
            salt=order.salt,
            send_to=address,
        )

    def place_prompt(
        self, order: messages.Submit, address: str, listener: Listener
    ) -> tuple[EngineClient, Route] | None:
        """Send a prompt to an engine that sends its blocks to an address; None if no engine works."""
        ask = Ask(len(order.prompt), chain_of_tokens(order.prompt, order.salt) if len(self.clients) > 1 else ())
        route = self.router.route(ask, self._down())
        if route is None:
            return None
        client = self.clients[route.name]
        client.submit(self._prompt_of(order, address), listener)
        return client, route

    def prefill_again(self, placement: Placement) -> None:
        """Handle the loss of an engine that computed a prompt."""
        assert placement.prefill is not None
        self._on_move(placement.prefill.name)
        placement.prefill.end("failed")
        placement.prefill = None
        if self._is_closed:
            self._placements.pop(placement.order.key, None)
            placement.end("failed")
            placement.listener.lose("the server is stopping")
        else:
            self._prefill(placement)

    def decode(self, placement: Placement, prefilled: int) -> None:
        """Send a request to the engine that decodes it; that has got so many computed prompt tokens for it."""
        assert placement.route is not None
        if placement.prefill is not None and placement.client is not None:
            placement.client.forget(placement.order.key)
            placement.prefill.end("finished")
            placement.prefill = None
        placement.client = self.clients[placement.route.name]
        order = msgspec.structs.replace(placement.order, prefilled=prefilled) if prefilled else placement.order
        placement.client.submit(order, placement)

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
            placement.end("aborted")

    def forget(self, key: int) -> None:
        """Drop the listener of a finished request."""
        placement = self._placements.pop(key, None)
        if placement is not None and placement.client is not None and placement.route is not None:
            placement.client.forget(key)
            placement.end("finished")

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
