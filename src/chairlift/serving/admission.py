"""Admission: a queue bounded by number, memory and predicted wait, and each tenant's own limits.

Each HTTP process has one for each model, used only from its event loop. The tenants' accounts and the length of the
queue are shared by all processes; of two that admit at the same moment, both may take the last place. Every call is
O(1).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chairlift.core.errors import ChairliftError, SettingsError
from chairlift.serving.accounts import MINUTE, Accounts
from chairlift.serving.drain import Drain, Returns
from chairlift.serving.keys import Tenant

BODY_BYTES_A_TOKEN = 8  # above the size of a prompt token as text or as a number, because other fields count too
_PATIENCE = 30.0  # seconds; the longest Retry-After for a tenant at its limit


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a request is not admitted, and when to try again."""

    # queue_full, long_wait, tenant_limit, tenant_rate, or too_many_requests: more than can ever be admitted
    reason: str
    message: str
    status: int
    retry_after: float  # whole seconds; 0 if a retry cannot succeed


class Refused(ChairliftError):  # noqa: N818
    """A request that was not admitted."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Admitted:
    """The admitted requests of one call, until released; `split` makes one object per request."""

    def __init__(self, admission: Admission, tenant: Tenant | None, tokens: int, requests: int) -> None:
        self.tenant = tenant
        self.tokens = tokens  # counted against max_waiting_tokens
        self.requests = requests
        self._admission = admission
        self._waits = True
        self._held = True

    def split(self, prompts: Sequence[int]) -> list[Admitted]:
        """Replace this object by one per request, given the tokens of each prompt."""
        self._waits = self._held = False
        rest = self.tokens - sum(prompts)  # tokens for the rest of the body count with the first request
        counts = [tokens + (rest if place == 0 else 0) for place, tokens in enumerate(prompts)]
        return [Admitted(self._admission, self.tenant, tokens, 1) for tokens in counts]

    def started(self, now: float) -> None:
        """Count the request as running: it has its first token."""
        if self._waits:
            self._waits = False
            self._admission._dequeue(self, now)

    def count(self, tokens: int) -> None:
        """Charge output tokens to the tenant's rate."""
        self._admission._charge(self.tenant, tokens)

    def release(self, now: float) -> None:
        """End the request: its client has read the answer or disconnected. A second call does nothing."""
        if self._held:
            self.started(now)
            self._held = False
            self._admission._end(self)


class Admission:
    """Admits requests while the queue is within its bounds.

    `is_busy` returns whether requests wait for room in the batch, not only for their own prefill: only then does the
    rate at which requests leave the queue measure the server's capacity.
    """

    def __init__(
        self,
        max_waiting: int,
        max_waiting_tokens: int,
        max_wait: float = math.inf,
        *,
        accounts: Accounts | None = None,
        queue: str = "queue",
        is_busy: Callable[[], bool] = lambda: True,
        random: Callable[[], float] = random.random,
    ) -> None:
        for name, value in (("max_waiting", max_waiting), ("max_waiting_tokens", max_waiting_tokens)):
            if value < 1:
                raise SettingsError(f"{name} is {value}: use 1 or more")
        if not max_wait > 0:
            raise SettingsError(f"max_wait is {max_wait}: use seconds above 0")
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._max_wait = max_wait
        self._is_busy = is_busy
        self._random = random
        self._waiting = 0
        self._waiting_tokens = 0
        self._live = 0
        self._drain = Drain()
        self._returns = Returns(random)
        self._accounts = accounts or Accounts()
        self._names = queue_names(queue)
        self._refusals: dict[str, int] = {}  # per tenant at its limit, since one of its requests last ended
        self._now = -math.inf  # the latest `now` that a caller passed

    @property
    def waiting(self) -> int:
        """Number of requests without a first token, of this process."""
        return self._waiting

    @property
    def waiting_tokens(self) -> int:
        """Tokens of waiting requests: of the prompt, or body bytes / BODY_BYTES_A_TOKEN if that is more."""
        return self._waiting_tokens

    @property
    def live(self) -> int:
        """Number of requests that have not ended."""
        return self._live

    def admit(
        self,
        tenant: Tenant | None,
        prompt_tokens: int,
        output_tokens: int,
        now: float,
        *,
        requests: int = 1,
        body_bytes: int = 0,
    ) -> Admitted:
        """Admit all requests of a call, or raise Refused with the reason.

        `output_tokens`, the most that may be generated, is not charged here: most answers are shorter, and each token
        is charged when it is generated.

        >>> admission = Admission(max_waiting=1, max_waiting_tokens=100)
        >>> admitted = admission.admit(None, 10, 10, now=0.0)
        >>> admission.waiting
        1
        """
        self._advance_clock(now)
        tokens = max(prompt_tokens, body_bytes // BODY_BYTES_A_TOKEN)
        refusal = (
            self._refuse_tenant(tenant, requests)
            or self._refuse_queue(tokens, requests)
            or self._refuse_race(tenant, requests)
        )
        if refusal is not None:
            raise Refused(refusal)
        self._enqueue(requests, tokens)
        self._live += requests
        self._charge(tenant, prompt_tokens)
        return Admitted(self, tenant, tokens, requests)

    def _refuse_tenant(self, tenant: Tenant | None, requests: int) -> Refusal | None:
        if tenant is None:
            return None
        most = tenant.max_concurrent
        if most is not None and requests > most:
            return _never(requests, f"the max_concurrent of tenant {tenant.name} is {most}", most)
        live = self._accounts.live(tenant.name)
        if most is not None and live + requests > most:
            return self._at_limit(tenant, live)
        debt = self._accounts.debt(tenant.name, self._now)
        if tenant.tokens_per_minute is not None and debt > 0:
            seconds = float(max(1, math.ceil(debt)))
            used = f"tenant {tenant.name} has used its tokens_per_minute, {tenant.tokens_per_minute}"
            return Refusal("tenant_rate", f"{used}: try again in {seconds:.0f} s", 429, seconds)
        return None

    def _refuse_race(self, tenant: Tenant | None, requests: int) -> Refusal | None:
        """Count the requests; undo and reject if another process has admitted some at the same moment."""
        if tenant is None:
            return None
        self._accounts.add(tenant.name, requests)
        live = self._accounts.live(tenant.name)
        if tenant.max_concurrent is None or live <= tenant.max_concurrent:
            return None
        self._accounts.add(tenant.name, -requests)
        return self._at_limit(tenant, live - requests)

    def _at_limit(self, tenant: Tenant, live: int) -> Refusal:
        refusals = self._refusals[tenant.name] = self._refusals.get(tenant.name, 0) + 1
        seconds = float(math.ceil(min(_PATIENCE, 1 + self._random() * refusals)))
        message = f"tenant {tenant.name} has {live} requests at once and its max_concurrent is {tenant.max_concurrent}"
        return Refusal("tenant_limit", f"{message}: try again in {seconds:.0f} s", 429, seconds)

    def _refuse_queue(self, tokens: int, requests: int) -> Refusal | None:
        if requests > self._max_waiting:
            return _never(requests, f"the server's --max-waiting is {self._max_waiting}", self._max_waiting)
        held, held_tokens = (self._accounts.live(name) for name in self._names)  # of all processes
        # An empty queue admits a prompt of any length: one longer than the bound would otherwise never be admitted.
        if held == 0:
            return None
        if held + requests > self._max_waiting:
            limit = f"the server's --max-waiting is {self._max_waiting:,}"
            return self._full(f"{held:,} requests are waiting and {limit}", held + requests - self._max_waiting, 0)
        if held_tokens + tokens > self._max_waiting_tokens:
            excess = max(1, min(held_tokens, held_tokens + tokens - self._max_waiting_tokens))
            limit = f"the server's --max-waiting-tokens is {self._max_waiting_tokens:,}"
            return self._full(f"{held_tokens:,} prompt tokens are waiting and {limit}", 0, excess)
        waiting, waiting_tokens = self._waiting + requests, self._waiting_tokens + tokens
        # If no request waits for room in the batch, the batch has room and the predicted wait is 0.
        wait = self._drain.seconds_for(waiting, waiting_tokens) if self._is_busy() else 0.0
        if wait > self._max_wait:
            seconds = self._returns.book(self._now, wait - self._max_wait, self._drain.seconds_each())
            predicted = f"{wait:.0f} s" if wait < MINUTE * MINUTE else "more than an hour"
            reason = f"the predicted wait is {predicted} ({self._waiting:,} requests are waiting)"
            limit = f"the server's --max-wait is {self._max_wait:g} s"
            return Refusal("long_wait", f"{reason} and {limit}: try again in {seconds:.0f} s", 429, seconds)
        return None

    def _full(self, held: str, excess: int, excess_tokens: int) -> Refusal:
        soonest = max(1.0, self._drain.seconds_for(excess, excess_tokens))
        seconds = self._returns.book(self._now, soonest, self._drain.seconds_each())
        return Refusal("queue_full", f"the queue is full: {held}; try again in {seconds:.0f} s", 429, seconds)

    def _advance_clock(self, now: float) -> None:
        if now > self._now:
            if self._waiting and self._is_busy():
                self._drain.busy(now - self._now)
            elif self._now > -math.inf:
                self._drain.idle(now - self._now)
            self._now = now

    def _charge(self, tenant: Tenant | None, tokens: int) -> None:
        """Charge at the latest known time; if that is too early, the tenant gains one bucket at most."""
        if tenant is not None and tenant.tokens_per_minute is not None:
            self._accounts.charge(tenant.name, tokens, tenant.tokens_per_minute, self._now)

    def _enqueue(self, requests: int, tokens: int) -> None:
        self._waiting += requests
        self._waiting_tokens += tokens
        for name, amount in zip(self._names, (requests, tokens), strict=True):
            self._accounts.add(name, amount)

    def _dequeue(self, admitted: Admitted, now: float) -> None:
        self._advance_clock(now)
        self._enqueue(-admitted.requests, -admitted.tokens)
        if self._is_busy():
            self._drain.leave(admitted.requests, admitted.tokens)

    def _end(self, admitted: Admitted) -> None:
        self._live -= admitted.requests
        if admitted.tenant is not None:
            self._accounts.add(admitted.tenant.name, -admitted.requests)
            self._refusals.pop(admitted.tenant.name, None)


def queue_names(queue: str) -> tuple[str, str]:
    """Return the names under which a queue's requests and tokens are counted; with a slash, as no tenant's has."""
    return f"{queue}/waiting", f"{queue}/tokens"


def _never(requests: int, bound: str, most: int) -> Refusal:
    message = f"the call has {requests} requests and {bound}: send {most} or fewer in a call"
    return Refusal("too_many_requests", message, 400, 0.0)
