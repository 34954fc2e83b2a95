"""Who may enter: a bounded queue, and each tenant's own limits. One event loop owns it; every call is O(1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.core.errors import ChairliftError, SettingsError
from chairlift.serving.keys import Tenant

MEMORY = 30.0  # seconds of waiting after which a departure counts for 1/e
LONGEST_RETRY = 120.0
MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not enter now, and when to come again."""

    reason: str  # queue_full, tenant_limit, tenant_rate, or too_many_requests: more in one call than can ever enter
    message: str
    status: int
    retry_after: float  # whole seconds; 0 when coming again is no use


class Refused(ChairliftError):  # noqa: N818
    """A request that was not let in."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Drain:
    """How fast requests leave the queue: sums that fade exponentially, over the time in which anything waited.

    Idle time says nothing about speed, so it does not count; a queue that stands still counts as slow.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._requests = 0.0
        self._tokens = 0.0
        self._is_known = False

    def wait(self, seconds: float) -> None:
        """So much time has gone by with somebody waiting."""
        fade = math.exp(-seconds / MEMORY)
        self._seconds = self._seconds * fade + MEMORY * (1 - fade)
        self._requests *= fade
        self._tokens *= fade

    def leave(self, requests: int, tokens: int) -> None:
        self._is_known = True
        self._requests += requests
        self._tokens += tokens

    def seconds_for(self, requests: int, tokens: int) -> float:
        """How long until so many will have left, of which one is above 0; 0 while nothing is known."""
        if not self._is_known:
            return 0.0
        pairs = ((requests, self._requests), (tokens, self._tokens))
        # A sum is 0 when what has left had no tokens, or when nothing has left for hours.
        return max(amount * self._seconds / left if left else math.inf for amount, left in pairs if amount > 0)


class _Account:
    """What a tenant has in use.

    Its token bucket holds a minute's worth and is one number: the time at which its debt is paid. A minute before `now`
    or earlier, it is full; after `now`, there is debt.
    """

    def __init__(self) -> None:
        self.live = 0
        self._paid_at = -math.inf

    def charge(self, tokens: int, per_minute: int, now: float) -> None:
        self._paid_at = max(self._paid_at, now - MINUTE) + tokens * MINUTE / per_minute

    def debt(self, now: float) -> float:
        """Seconds until it is paid."""
        return max(0.0, self._paid_at - now)


class Ticket:
    """A place inside, held until released."""

    def __init__(self, admission: Admission, tenant: Tenant | None, prompt_tokens: int, requests: int) -> None:
        self.tenant = tenant
        self.prompt_tokens = prompt_tokens
        self.requests = requests
        self._admission = admission
        self._waits = True
        self._held = True

    def split(self, prompts: Sequence[int]) -> list[Ticket]:
        """A ticket for each of its requests, by their prompts' tokens, in place of this one."""
        self._waits = self._held = False
        return [Ticket(self._admission, self.tenant, tokens, 1) for tokens in prompts]

    def started(self, now: float) -> None:
        """The first token has come: it no longer waits."""
        if self._waits:
            self._waits = False
            self._admission._leave_queue(self, now)

    def count(self, tokens: int) -> None:
        """Output tokens have come, for the tenant's rate."""
        self._admission._charge(self.tenant, tokens)

    def release(self, now: float) -> None:
        """It has ended, in whatever way; a second call changes nothing."""
        if self._held:
            self.started(now)
            self._held = False
            self._admission._leave(self)


class Admission:
    """Lets requests in while there is room."""

    def __init__(self, max_waiting: int, max_waiting_tokens: int) -> None:
        for name, value in (("max_waiting", max_waiting), ("max_waiting_tokens", max_waiting_tokens)):
            if value < 1:
                raise SettingsError(f"{name} is {value}: use 1 or more")
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._waiting = 0
        self._waiting_tokens = 0
        self._live = 0
        self._drain = Drain()
        self._accounts: dict[str, _Account] = {}  # as many as there are tenants in the key file
        self._now = -math.inf  # the latest time anybody told

    @property
    def waiting(self) -> int:
        """Requests that have no first token yet."""
        return self._waiting

    @property
    def waiting_tokens(self) -> int:
        """The prompt tokens of those."""
        return self._waiting_tokens

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return self._live

    def admit(
        self, tenant: Tenant | None, prompt_tokens: int, output_tokens: int, now: float, *, requests: int = 1
    ) -> Ticket:
        """Let a call's requests in, all or none; Refused says why not.

        What it may answer at most, `output_tokens`, costs nothing yet: most answers end sooner, and each token is
        charged as it comes.

        >>> admission = Admission(max_waiting=1, max_waiting_tokens=100)
        >>> ticket = admission.admit(None, 10, 10, now=0.0)
        >>> admission.waiting
        1
        """
        self._tell(now)
        refusal = self._refuse_tenant(tenant, requests) or self._refuse_queue(prompt_tokens, requests)
        if refusal is not None:
            raise Refused(refusal)
        self._waiting += requests
        self._waiting_tokens += prompt_tokens
        self._live += requests
        if tenant is not None:
            self._account(tenant).live += requests
            self._charge(tenant, prompt_tokens)
        return Ticket(self, tenant, prompt_tokens, requests)

    def _refuse_tenant(self, tenant: Tenant | None, requests: int) -> Refusal | None:
        if tenant is None:
            return None
        account = self._account(tenant)
        most = tenant.max_concurrent
        if most is not None and requests > most:
            return _never(requests, f"tenant {tenant.name} may have {most} at once", most)
        if most is not None and account.live + requests > most:
            message = f"tenant {tenant.name} has {account.live} of {most} requests at once: wait until one has ended"
            return Refusal("tenant_limit", message, 429, 1.0)
        debt = account.debt(self._now)
        if tenant.tokens_per_minute is not None and debt > 0:
            seconds = max(1, math.ceil(debt))
            used = f"tenant {tenant.name} has used its {tenant.tokens_per_minute} tokens per minute"
            return Refusal("tenant_rate", f"{used}: try again in {seconds} s", 429, float(seconds))
        return None

    def _refuse_queue(self, prompt_tokens: int, requests: int) -> Refusal | None:
        if requests > self._max_waiting:
            return _never(requests, f"the queue holds {self._max_waiting}", self._max_waiting)
        # With nobody before it any prompt may enter: a longer one than the bound could not otherwise, ever.
        excess = self._waiting + requests - self._max_waiting
        excess_tokens = self._waiting_tokens + prompt_tokens - self._max_waiting_tokens
        if self._waiting == 0 or (excess <= 0 and excess_tokens <= 0):
            return None
        if prompt_tokens > self._max_waiting_tokens:
            excess, excess_tokens = self._waiting, self._waiting_tokens
        seconds = float(math.ceil(min(LONGEST_RETRY, max(1.0, self._drain.seconds_for(excess, excess_tokens)))))
        held = f"{self._waiting} requests with {self._waiting_tokens} prompt tokens are waiting"
        return Refusal("queue_full", f"the queue is full ({held}): try again in {seconds:.0f} s", 429, seconds)

    def _tell(self, now: float) -> None:
        if now > self._now:
            if self._waiting:
                self._drain.wait(now - self._now)
            self._now = now

    def _account(self, tenant: Tenant) -> _Account:
        return self._accounts.setdefault(tenant.name, _Account())

    def _charge(self, tenant: Tenant | None, tokens: int) -> None:
        """Charge at the latest time known; where that is too early, the tenant gains a bucket at most."""
        if tenant is not None and tenant.tokens_per_minute is not None:
            self._account(tenant).charge(tokens, tenant.tokens_per_minute, self._now)

    def _leave_queue(self, ticket: Ticket, now: float) -> None:
        self._tell(now)
        self._waiting -= ticket.requests
        self._waiting_tokens -= ticket.prompt_tokens
        self._drain.leave(ticket.requests, ticket.prompt_tokens)

    def _leave(self, ticket: Ticket) -> None:
        self._live -= ticket.requests
        if ticket.tenant is not None:
            self._account(ticket.tenant).live -= ticket.requests


def _never(requests: int, bound: str, most: int) -> Refusal:
    message = f"the call has {requests} requests and {bound}: send {most} or fewer in a call"
    return Refusal("too_many_requests", message, 400, 0.0)
