"""Pools: which engines compute prompts and which decode, and where the prompt of a request is computed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from chairlift.core.errors import SettingsError
from chairlift.routing.loads import TOKENS_A_REQUEST
from chairlift.routing.policies import Ask
from chairlift.routing.router import Route, Router

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
# Prompt tokens, not cached where the request is decoded, that are computed there: a step takes hardly longer for them,
# and sending them elsewhere would take longer than that.
LOCAL_TOKENS = 32


class Pools:
    """The roles of the engines of one model.

    An engine of role `both` belongs to both pools: the router moves it between them with each request, by load. While a
    pool has no engine that works, the engines of the other do its work.
    """

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self._roles = roles

    @property
    def are_apart(self) -> bool:
        """Whether the engines have different roles."""
        return len(set(self._roles.values())) > 1

    def decoding(self, ask: Ask, router: Router, down: Collection[str]) -> Route | None:
        """Route a request to the engine that decodes it; None if no engine works."""
        if not self.are_apart:
            return router.route(ask, down)
        return router.route(ask, {*down, *self._only("prefill")}) or router.route(ask, down)

    def prefilling(self, ask: Ask, router: Router, decoding: Route, down: Collection[str]) -> Route | None:
        """Route a prompt to the engine that computes it; None if the engine that decodes it does that best."""
        name = decoding.name
        if not self.are_apart or self._roles[name] == "prefill" or ask.tokens - decoding.cached <= LOCAL_TOKENS:
            return None
        others = {*down, *self._only("decode"), name}
        found = router.choose(ask, others)
        if found is None:
            return None
        # The request counts at the engine that decodes it; compare the two loads without it.
        own = ask.tokens - decoding.cached + TOKENS_A_REQUEST
        if self._roles[name] == "both" and router.loads.work(name) - own <= router.loads.work(found):
            return None
        decoding.started()  # its prompt is no work for the engine that decodes it
        return router.send(ask, found)

    def _only(self, role: Role) -> set[str]:
        return {name for name, own in self._roles.items() if own == role}


def roles_of(text: str, replicas: int | None = None) -> list[Role]:
    """Read the roles of a server's engines: one role for all of them, or how many of each.

    >>> roles_of("decode", 2), roles_of("prefill=1,decode=2")
    (['decode', 'decode'], ['prefill', 'decode', 'decode'])
    """
    if text in ROLES:
        return [role for role in ROLES if role == text] * (replicas or 1)
    found: list[Role] = []
    for part in text.split(","):
        name, _, count = part.partition("=")
        role = next((each for each in ROLES if each == name.strip()), None)
        if role is None or not count.strip().isdecimal() or not 0 < int(count) <= 64 or role in found:
            raise SettingsError(
                f"the role is {text!r}: use prefill, decode or both, or counts such as prefill=1,decode=2"
            )
        found += [role] * int(count)
    if replicas not in (None, len(found)):
        raise SettingsError(
            f"the role {text!r} is of {len(found)} engines, and --replicas is {replicas}: leave one out"
        )
    if not {"decode", "both"} & set(found) or not {"prefill", "both"} & set(found):
        raise SettingsError(f"the role is {text!r}: some engine must compute prompts, and some engine must decode")
    return found
