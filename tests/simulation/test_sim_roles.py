"""Roles in a simulation: the server's pools choose, blocks take their time on the link, and nothing is lost."""

from __future__ import annotations

import random

import pytest

from chairlift.core.cost import Cost
from chairlift.core.limits import Limits
from chairlift.core.settings import Settings
from chairlift.routing.pools import Role
from chairlift.simulation.replica import Hardware
from chairlift.simulation.run import Simulation
from chairlift.simulation.transfers import MESSAGE
from chairlift.traffic.query import Query

COST = Cost(fixed=0.002, weights=0.003, token=1e-4, context=1e-7, pair=1e-8, sample=1e-5)
APART: tuple[Role, ...] = ("prefill", "decode", "decode")


def simulation_of(roles: tuple[Role, ...], link: float = 1e9, kv_bytes: int = 1000) -> Simulation:
    hardware = Hardware(COST, Limits(16, 256, 4096, 1), 16384, 16, True, 0, kv_bytes, link)
    return Simulation(hardware, Settings.of(), roles=roles)


def some(count: int = 150) -> list[Query]:
    r = random.Random(1)
    return [Query(r.randint(1, 900), r.randint(1, 60), at=number / 20) for number in range(count)]


@pytest.mark.parametrize("roles", [APART, ("prefill", "decode"), ("both", "prefill", "decode"), ("both", "both")])
def test_every_request_ends_at_one_replica_with_all_its_tokens(roles: tuple[Role, ...]) -> None:
    queries = [*some(), Query(5000, 3, at=9.0)]  # the last one is longer than the model's context
    simulation = simulation_of(roles)
    found = simulation.run(queries)
    assert (found.finished, found.rejected) == (150, 1)
    assert found.output_tokens == sum(query.output_tokens for query in queries[:-1])
    assert found.times["ttft"].count == 150
    router = simulation._router
    assert router is not None and all(counts.live == 0 for counts in router.counts.values())
    for replica in simulation.replicas:
        replica.engine.scheduler.check()
        assert not replica.has_work


def test_a_decode_replica_computes_no_prompt_that_another_one_has_sent() -> None:
    simulation = simulation_of(APART)
    steps: list[tuple[int, int]] = []
    simulation.on_step = lambda number, plan, *_: steps.append((number, max(plan.counts, default=0)))
    simulation.run([Query(600, 20, at=float(number)) for number in range(10)])
    assert max(count for number, count in steps if number == 0) == 256
    assert max(count for number, count in steps if number > 0) < 16  # what is left behind whole blocks
    assert simulation.outlook.sent_bytes == 10 * 608 * 1000
    assert simulation.outlook.cached_tokens == 0  # blocks of another replica are no prefix hits


def test_a_slower_link_delays_the_first_token_by_the_bytes_that_follow_the_last_step() -> None:
    def first_token(link: float) -> float:
        return simulation_of(APART, link).run([Query(608, 4)]).times["ttft"].most

    fast, slow = first_token(1e15), first_token(1e6)
    assert slow - fast == pytest.approx(608 * 1000 / 1e6, rel=0.2)  # some blocks go while others are computed
    assert fast > MESSAGE


def test_answers_do_not_wait_for_long_prompts_of_others() -> None:
    def tpot(roles: tuple[Role, ...]) -> float:
        talk = [Query(100, 150, at=0.01 * number) for number in range(8)]
        long = [Query(3500, 2, at=0.5 + 0.2 * number) for number in range(8)]
        return simulation_of(roles).run([*talk, *long]).times["tpot"].percentile(99)

    assert tpot(("prefill", "decode")) < 0.7 * tpot(("both",))
