"""Routing policies in random worlds: what holds after every choice, whatever comes, ends, dies and returns."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.errors import SettingsError
from chairlift.routing.loads import Loads
from chairlift.routing.policies import BALANCE, POLICIES, SLACK, Ask, CacheAware
from chairlift.routing.prefixes import MOST_BLOCKS, PrefixTree, chain_of_text, chain_of_tokens
from chairlift.routing.router import Route, Router

ENDS = ("finished", "aborted", "rejected", "failed")


class World:
    """Chats that grow turn by turn over replicas that die and return; the truth is kept beside the router."""

    def __init__(self, seed: int, policy: str, replicas: int, capacity: int) -> None:
        self.chance = random.Random(seed)
        self.names = [f"r{number}" for number in range(replicas)]
        self.router = Router(self.names, policy, capacity=capacity)
        self.capacity = capacity
        self.closed: set[str] = set()
        self.live: list[Route] = []
        self.sent: Counter[str] = Counter()
        self.known: dict[str, set[int]] = {name: set() for name in self.names}  # ever sent since its last start
        self.chats = [[self.chance.randrange(5)] for _ in range(6)]

    def ask(self) -> Ask:
        chat = self.chance.choice(self.chats)
        chat += [self.chance.randrange(3) for _ in range(self.chance.randrange(4))]
        tokens = [token for block in chat for token in [block] * 4]
        return Ask(len(tokens), chain_of_tokens(tokens, size=4), self.chance.choice(["", "one", "two"]), 4)

    def step(self) -> None:
        match self.chance.choice(["send"] * 6 + ["end"] * 4 + ["start", "eject", "readmit", "restart"]):
            case "send":
                self._send()
            case "end" if self.live:
                route = self.live.pop(self.chance.randrange(len(self.live)))
                for _ in range(self.chance.choice([1, 1, 2])):
                    route.end(self.chance.choice(ENDS))
                    route.started()  # a late report of its first token changes nothing
            case "start" if self.live:
                for _ in range(self.chance.choice([1, 2])):
                    self.chance.choice(self.live).started()
            case "eject":
                name = self.chance.choice(self.names)
                self.closed.add(name)
                self.router.eject(name)
            case "readmit":
                name = self.chance.choice(self.names)
                self.closed.discard(name)
                self.router.readmit(name)
            case "restart":
                name = self.chance.choice(self.names)
                for route in [each for each in self.live if each.name == name]:
                    route.end("failed")
                    self.live.remove(route)
                self.router.forget(name)
                self.known[name].clear()

    def _send(self) -> None:
        ask = self.ask()
        exclude = set(self.chance.sample(self.names, self.chance.choice([0, 0, 1])))
        allowed = [name for name in self.names if name not in self.closed | exclude]
        before = {name: self.router.loads.live(name) for name in allowed}
        route = self.router.route(ask, exclude)
        assert (route is None) == (not allowed), "a request is refused only if no replica may take it"
        if route is None:
            return
        assert route.name in allowed
        assert 0 <= route.cached <= ask.tokens
        assert route.cached <= 4 * sum(block in self.known[route.name] for block in ask.chain), "it believes too much"
        if isinstance(self.router.policy, CacheAware):
            assert before[route.name] < math.ceil(BALANCE * (sum(before.values()) + 1) / len(allowed)) + SLACK
        self.live.append(route)
        self.sent[route.name] += 1
        self.known[route.name] |= set(ask.chain)

    def check(self) -> None:
        for name in self.names:
            live = sum(route.name == name for route in self.live)
            counts = self.router.counts[name]
            assert counts.live == live == self.router.loads.live(name)
            assert counts.sent == self.sent[name]
            assert self.router.loads.pending(name) >= 0
            if isinstance(self.router.policy, CacheAware):
                assert self.router.policy.size(name) <= self.capacity
        if not self.live:
            assert all(self.router.loads.work(name) == 0 for name in self.names)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), replicas=st.integers(1, 5), capacity=st.sampled_from([1, 3, 20, 1000]))
def test_every_request_is_accounted_for_and_no_ejected_replica_is_chosen(
    policy: str, seed: int, replicas: int, capacity: int
) -> None:
    world = World(seed, policy, replicas, capacity)
    for _ in range(150):
        world.step()
        world.check()
    for route in world.live:
        route.end("finished")
    world.live.clear()
    world.check()


@given(
    paths=st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=40),
    capacity=st.integers(1, 12),
)
def test_a_tree_is_bounded_and_holds_whole_prefixes_only(paths: list[list[int]], capacity: int) -> None:
    tree = PrefixTree(capacity)
    chains = [chain_of_tokens(path, size=1) for path in paths]
    for chain in chains:
        tree.add(chain)
        assert len(tree) <= capacity
        assert tree.match(chain) == min(len(chain), capacity), "what was just sent is known"
    held = {block for chain in chains for block in chain[: tree.match(chain)]}
    assert len(held) == len(tree), "a block without the blocks before it would never match"


def test_a_restarted_replica_is_believed_to_have_nothing_cached() -> None:
    router = Router(["a", "b"])
    ask = Ask(640, chain_of_tokens(list(range(640))))
    first = router.route(ask)
    assert first is not None and first.cached == 0
    again = router.route(ask)
    assert again is not None and again.name == first.name and again.cached == 640
    router.forget(first.name)
    assert router.policy.cached(ask, first.name) == 0


def test_a_conversation_stays_where_its_prefix_is_and_new_ones_spread() -> None:
    router = Router(["a", "b", "c"])
    homes = {}
    for turn in range(5):
        for chat in range(12):
            tokens = [1000 * chat + place for place in range(64 * (1 + turn))]
            route = router.route(Ask(len(tokens), chain_of_tokens(tokens)))
            assert route is not None
            route.end("finished")
            assert homes.setdefault(chat, route.name) == route.name
    assert sorted(Counter(homes.values()).values()) == [4, 4, 4]


def test_a_hot_prefix_does_not_overload_one_replica() -> None:
    router = Router(["a", "b", "c", "d"])
    ask = Ask(64_000, chain_of_tokens([7] * 64_000))
    for _ in range(400):
        assert router.route(ask) is not None
    live = [router.loads.live(name) for name in router.names]
    assert sum(live) == 400 and max(live) <= BALANCE * 100 + SLACK + 1


@pytest.mark.parametrize("names", [["0", "1", "2"], ["http://10.0.0.1:80", "http://10.0.0.2:80", "http://10.0.0.3:80"]])
def test_sessions_are_spread_evenly_over_any_names(names: list[str]) -> None:
    router = Router(names, "session")
    routes = [router.route(Ask(10, session=f"user-{number}")) for number in range(3000)]
    counts = Counter(route.name for route in routes if route is not None)
    assert min(counts.values()) > 900 and max(counts.values()) < 1100


def test_sessions_stay_and_only_those_of_an_ejected_replica_move() -> None:
    router = Router(["a", "b", "c", "d"], "session")

    def homes() -> dict[str, str]:
        found = {}
        for number in range(200):
            route = router.route(Ask(10, session=f"user-{number}"))
            assert route is not None
            found[f"user-{number}"] = route.name
        return found

    before = homes()
    assert min(Counter(before.values()).values()) > 20, "sessions are spread"
    router.eject("b")
    after = homes()
    assert {session for session in before if before[session] != after[session]} == {
        session for session, name in before.items() if name == "b"
    }
    router.readmit("b")
    assert homes() == before


def test_the_least_loaded_replica_has_the_fewest_tokens_to_compute() -> None:
    router = Router(["a", "b"], "least-loaded")
    long = router.route(Ask(100_000))
    assert long is not None
    others = {router.route(Ask(10)).name for _ in range(20)}  # type: ignore[union-attr]
    assert others == {"a", "b"} - {long.name}


def test_salts_share_no_hash_and_a_long_prompt_costs_a_bounded_time() -> None:
    text = "the same words " * 100
    assert not set(chain_of_text(text, "alice")) & set(chain_of_text(text, "bob"))
    assert chain_of_text(text, "alice") == chain_of_text(text + "and more", "alice")[: len(text) // 256]
    assert len(chain_of_tokens([1] * 64 * (MOST_BLOCKS + 9))) == MOST_BLOCKS


def test_an_unknown_policy_is_refused_with_the_names() -> None:
    with pytest.raises(SettingsError, match="'best': use one of cache-aware, least-loaded, session, round-robin"):
        Router(["a"], "best")


def test_loads_start_at_zero() -> None:
    assert Loads().work("any") == 0
