"""Generators: their rates, lengths and prefixes are those asked for, in order, and the same for the same seed."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice, pairwise
from statistics import fmean

import pytest

from chairlift.core.errors import ChairliftError
from chairlift.traffic.arrivals import DAY, Demand, send_times
from chairlift.traffic.generators import BLOCK_TOKENS
from chairlift.traffic.query import Query
from chairlift.traffic.workloads import Lengths

PROMPT, OUTPUT = Lengths.parse("200:20..2000"), Lengths.parse("50:5..500")


def drawn(workload: str, requests: int = 2000, rate: float = 10.0, **more: object) -> list[Query]:
    demand = {"prompt": PROMPT, "output": OUTPUT, "requests": requests, "rate": rate, **more}
    return list(Demand(workload, **demand).stream())  # type: ignore[arg-type]


@pytest.mark.parametrize("workload", ["uniform", "lognormal", "groups", "chats", "chats*3+groups:count=2+uniform"])
def test_requests_come_in_order_at_their_rate_and_are_the_same_for_the_same_seed(workload: str) -> None:
    found = drawn(workload, 4000)
    assert all(a.at <= b.at for a, b in pairwise(found))
    assert 4000 / found[-1].at == pytest.approx(10, rel=0.15)
    assert found == drawn(workload, 4000) != drawn(workload, 4000, seed=1)
    assert all(len(query.blocks) * query.block_tokens <= query.prompt_tokens for query in found)


@pytest.mark.parametrize(("mean", "p99"), [(512, 4096), (100, 300), (1000, 1010)])
def test_lognormal_lengths_have_the_mean_and_the_p99_asked_for(mean: int, p99: int) -> None:
    r, lengths = random.Random(0), Lengths.parse(f"{mean}:p99={p99}")
    found = sorted(lengths.lognormal(r) for _ in range(40_000))
    assert fmean(found) == pytest.approx(mean, rel=0.04)
    assert found[int(0.99 * len(found))] == pytest.approx(p99, rel=0.08)


@pytest.mark.parametrize("text", ["512:p99=100", "512:p99=20000", "x:p99=3", "0:p99=3", "5:p99=nan"])
def test_lengths_that_no_distribution_has_are_refused(text: str) -> None:
    with pytest.raises(ChairliftError, match=r"no lognormal length|not a length"):
        Lengths.parse(text)


def test_lengths_with_a_p99_are_not_for_uniform() -> None:
    with pytest.raises(ChairliftError, match="use the workload lognormal"):
        drawn("uniform", prompt=Lengths.parse("64:p99=512"))


def test_a_diurnal_rate_follows_the_day_and_keeps_its_mean() -> None:
    times = list(islice(send_times("diurnal", 0.2, seed=3), 40_000))
    quarters = Counter(int(4 * (at % DAY) / DAY) for at in times if at < 2 * DAY)
    assert quarters[1] + quarters[2] > 2.5 * (quarters[0] + quarters[3])
    assert sum(at < 2 * DAY for at in times) == pytest.approx(0.2 * 2 * DAY, rel=0.05)


def test_groups_share_their_prefix_and_nothing_else() -> None:
    found = drawn("groups:count=3,shared=640")
    heads = {tuple(query.blocks) for query in found}
    assert len(heads) == 3 and {len(head) for head in heads} == {640 // BLOCK_TOKENS}
    assert min(query.prompt_tokens for query in found) >= 640 + 20


def test_a_turn_of_a_chat_begins_with_the_turn_before_it() -> None:
    found = drawn("chats:turns=4,think=5,system=128")
    sessions: dict[int, list[Query]] = {}
    for query in found:
        assert query.blocks[:2] == found[0].blocks[:2]  # the system prompt
        if len(query.blocks) > 2:
            sessions.setdefault(query.blocks[2], []).append(query)
    longer = [turns for turns in sessions.values() if len(turns) > 1]
    assert len(longer) > 100
    for turns in longer:
        for before, after in pairwise(turns):
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens and after.at > before.at


def test_a_mix_has_each_part_by_its_weight_as_a_tenant() -> None:
    found = Counter(query.tenant for query in drawn("lognormal*3+uniform", 4000))
    assert found["lognormal"] / found["uniform"] == pytest.approx(3, rel=0.15)


def test_equal_blocks_become_equal_tokens_for_a_server() -> None:
    one, other, *_ = Demand("groups:count=1,shared=128", 2, PROMPT, OUTPUT, rate=1.0, vocab_size=99).queries()
    assert one.ids[:128] == other.ids[:128] and one.ids[128:148] != other.ids[128:148]
    assert max(one.ids) < 99


def test_a_duration_bounds_endless_requests_and_they_are_drawn_one_by_one() -> None:
    assert drawn("uniform", requests=None, duration=30)[-1].at < 30  # type: ignore[arg-type]
    assert len(drawn("chats", requests=None, rate=None)) == 64  # type: ignore[arg-type]
    week = Demand("uniform", None, PROMPT, OUTPUT, rate=100.0, duration=7 * DAY, arrivals="diurnal").stream()
    assert len(list(islice(week, 10))) == 10


@pytest.mark.parametrize(
    "text", ["chats:turns", "chats:speed=3", "uniform:turns=3", "chats*0", "groups:count=-1+chats"]
)
def test_a_wrong_specification_is_refused_with_its_options(text: str) -> None:
    with pytest.raises(ChairliftError, match=r"is not a workload: use"):
        drawn(text)
