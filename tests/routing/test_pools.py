"""Which engine computes a prompt and which decodes it."""

from __future__ import annotations

import pytest

from chairlift.core.errors import SettingsError
from chairlift.routing.policies import Ask
from chairlift.routing.pools import LOCAL_TOKENS, Pools, Role, roles_of
from chairlift.routing.prefixes import chain_of_tokens
from chairlift.routing.router import Router


def place(pools: Pools, router: Router, ask: Ask, down: set[str] | None = None) -> tuple[str, str | None]:
    """The engines that decode a request and compute its prompt."""
    decoding = pools.decoding(ask, router, down or set())
    assert decoding is not None
    prefilling = pools.prefilling(ask, router, decoding, down or set())
    return decoding.name, None if prefilling is None else prefilling.name


ROLES: dict[str, Role] = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}


def test_prompts_and_answers_go_to_their_pools_in_turn() -> None:
    pools, router = Pools(ROLES), Router(ROLES, "least-loaded")
    placed = [place(pools, router, Ask(500)) for _ in range(4)]
    assert sorted(decode for decode, _ in placed) == ["d", "d", "e", "e"]
    assert sorted(prefill or "" for _, prefill in placed) == ["p", "p", "q", "q"]
    assert all(router.loads.pending(name) == 0 for name in "de"), "prompts are no work for those that decode"
    assert router.loads.pending("p") == 1000


def test_few_uncached_tokens_are_computed_where_they_are_decoded() -> None:
    pools, router = Pools(ROLES), Router(ROLES)
    assert place(pools, router, Ask(LOCAL_TOKENS))[1] is None
    prompt = list(range(640))
    ask = Ask(640, chain_of_tokens(prompt))
    decode, prefill = place(pools, router, ask)
    assert prefill is not None
    assert place(pools, router, ask) == (decode, None), "all of it is cached there"


def test_a_pool_without_a_working_engine_is_replaced_by_the_other() -> None:
    pools, router = Pools(ROLES), Router(ROLES, "least-loaded")
    assert place(pools, router, Ask(500), {"p", "q"})[1] is None
    decode, prefill = place(pools, router, Ask(500), {"d", "e"})
    assert decode in "pq" and prefill is None
    assert pools.decoding(Ask(500), router, set(ROLES)) is None


def test_an_engine_of_both_roles_is_used_for_whichever_pool_has_more_work() -> None:
    roles: dict[str, Role] = {"p": "prefill", "b": "both", "d": "decode"}
    pools, router = Pools(roles), Router(roles, "least-loaded")
    router.loads.add("p", 10, 50_000)
    router.loads.add("d", 0, 0)
    placed = [place(pools, router, Ask(500)) for _ in range(6)]
    assert any(prefill == "b" for decode, prefill in placed if decode == "d"), "the prefill engine is busy"
    router.loads.add("d", 100, 0)
    assert place(pools, router, Ask(500))[0] == "b", "the decode engine is busy"


def test_a_prompt_that_is_computed_where_it_is_decoded_leaves_no_trace_elsewhere() -> None:
    roles: dict[str, Role] = {"p": "prefill", "b": "both"}
    pools, router = Pools(roles), Router(roles)
    router.loads.add("p", 10, 50_000)
    ask = Ask(640, chain_of_tokens(list(range(640))))
    assert place(pools, router, ask) == ("b", None), "the prefill engine is busy"
    assert router.counts["p"].sent == 0
    assert router.policy.cached(ask, "p") == 0, "it was never sent there"


def test_engines_of_one_role_are_ordinary_replicas() -> None:
    pools, router = Pools(dict.fromkeys("ab", "both")), Router("ab", "round-robin")
    assert [place(pools, router, Ask(5000)) for _ in range(2)] == [("a", None), ("b", None)]


@pytest.mark.parametrize(
    "text", ["", "prefill=1", "decode=2", "prefill=x,decode=1", "prefill=1,decode=1,decode=1", "all"]
)
def test_roles_that_cannot_serve_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="the role is"):
        roles_of(text)
