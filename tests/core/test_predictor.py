"""How long an answer will be: what is learned from which traffic, what bounds it, and when it is not to be believed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from random import Random
from statistics import stdev
from typing import NamedTuple

import pytest
from examples import request as plain
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chairlift.core import predictor as module
from chairlift.core.params import SamplingParams
from chairlift.core.predictor import ENOUGH, PREDICTORS, STRIDE, WINDOW, Predictor, spearman
from chairlift.core.request import Request

CONTEXT = 16384
IN_FLIGHT = 16  # answers that are under way while the next request comes
VOCAB = 30000
NEVER_CUT = SamplingParams(max_tokens=None)

_names = count()


class Arrival(NamedTuple):
    """A request, the answer it will get, and the scale that the answer was drawn with."""

    request: Request
    length: int
    scale: float


def words(random: Random, number: int) -> list[int]:
    return [random.randrange(VOCAB) for _ in range(number)]


def asking(
    prompt: list[int],
    tenant: str = "",
    endpoint: str = "",
    params: SamplingParams = NEVER_CUT,
    known: int | None = None,
) -> Request:
    return Request(f"r{next(_names)}", prompt, params, tenant=tenant, endpoint=endpoint, known_length=known)


def by_tenant_and_system_prompt(random: Random, tenant: int, kind: int, openings: list[list[int]]) -> Request:
    return asking([1, 2, 3, *openings[kind], *words(random, 50)], f"tenant {tenant}", "chat")


def by_tenant_and_last_words(random: Random, tenant: int, kind: int, openings: list[list[int]]) -> Request:
    return asking([1, 2, 3, *words(random, 50), *openings[kind][:6], 7, 8], f"tenant {tenant}", "chat")


def by_tenant_and_prompt_length(random: Random, tenant: int, kind: int, openings: list[list[int]]) -> Request:
    return asking([1, 2, 3, *words(random, 61 + 16 * kind + random.randrange(8))], f"tenant {tenant}", "chat")


def by_conversation_and_endpoint(random: Random, tenant: int, kind: int, openings: list[list[int]]) -> Request:
    prompt = [*range(100), *openings[kind], *range(100), *words(random, 50)]
    return asking(prompt, "", f"endpoint {tenant}")


Maker = Callable[[Random, int, int, list[list[int]]], Request]
MAKERS: list[Maker] = [
    by_tenant_and_system_prompt,
    by_tenant_and_last_words,
    by_tenant_and_prompt_length,
    by_conversation_and_endpoint,
]


def traffic(make: Maker, number: int, seed: int, *, is_flipped: bool = False) -> list[Arrival]:
    """Lognormal lengths with a scale that depends on one of four tenants and on one of four kinds of prompt."""
    world, random = Random(seed), Random(f"{seed} {is_flipped}")
    openings = [words(world, 300) for _ in range(4)]
    tenants, kinds = [-1.2, -0.4, 0.4, 1.2], [-0.9, -0.3, 0.3, 0.9]
    world.shuffle(kinds)
    arrivals = []
    for _ in range(number):
        tenant, kind = random.randrange(4), random.randrange(4)
        scale = (tenants[tenant] + kinds[kind]) * (-1 if is_flipped else 1) + math.log(150)
        length = max(1, round(random.lognormvariate(scale, 0.7)))
        arrivals.append(Arrival(make(random, tenant, kind, openings), length, scale))
    return arrivals


def serve(predictor: Predictor, arrivals: Iterable[Arrival]) -> list[int]:
    """Predict each request as it comes, and learn as answers end, some requests later; the predictions."""
    predictions: list[int] = []
    under_way: deque[Arrival] = deque()
    for arrival in arrivals:
        predictions.append(predictor.predict(arrival.request))
        under_way.append(arrival)
        if len(under_way) > IN_FLIGHT:
            ended = under_way.popleft()
            predictor.learn(ended.request, ended.length)
    for ended in under_way:
        predictor.learn(ended.request, ended.length)
    return predictions


def against_the_best(predictions: list[int], arrivals: list[Arrival]) -> float:
    """The rank correlation as a share of that of a predictor that knows every scale."""
    lengths = [arrival.length for arrival in arrivals]
    return reference(predictions, lengths) / reference([arrival.scale for arrival in arrivals], lengths)


def reference(left: list[int] | list[float], right: list[int]) -> float:
    """Spearman's correlation, straight from its definition."""

    def ranks(values: list[int] | list[float]) -> list[float]:
        return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]

    a, b = ranks(left), ranks(right)
    middle = (len(a) - 1) / 2
    covariance = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    return covariance / math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))


def history() -> Predictor:
    return PREDICTORS["history"](CONTEXT)


# ---- what is learned


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", MAKERS)
def test_after_300_requests_the_order_is_nearly_that_of_who_knows_every_scale(make: Maker, seed: int) -> None:
    arrivals = traffic(make, 700, seed)
    predictions = serve(history(), arrivals)
    assert against_the_best(predictions[300:], arrivals[300:]) >= 0.85


@pytest.mark.parametrize("seed", range(3))
def test_where_nothing_tells_the_length_all_get_about_the_usual_one(seed: int) -> None:
    random = Random(seed)
    openings, endings = [[words(random, 40) for _ in range(50)] for _ in range(2)]
    arrivals = []
    for _ in range(1500):
        prompt = random.choice(openings) + words(random, random.randrange(200)) + random.choice(endings)
        length = round(random.lognormvariate(4, 1)) + 1
        arrivals.append(Arrival(asking(prompt, f"tenant {random.randrange(50)}"), length, 0))
    predictions = serve(history(), arrivals)[1000:]
    assert stdev(map(math.log, predictions)) < 0.4  # to take all at their word would be twice as wild


def test_what_is_known_of_a_tenant_holds_for_prompts_of_a_new_kind() -> None:
    predictor, random = history(), Random(0)
    for _ in range(100):
        predictor.learn(asking(words(random, 50), "brief"), 10)
        predictor.learn(asking(words(random, 50), "wordy"), 1000)
    brief, wordy = [predictor.predict(asking(words(random, 2000), tenant)) for tenant in ("brief", "wordy")]
    assert wordy > 10 * brief


def test_what_is_known_of_a_system_prompt_holds_for_a_new_tenant() -> None:
    predictor, random = history(), Random(0)
    brief, wordy = words(random, 40), words(random, 40)
    for turn in range(100):
        predictor.learn(asking(brief + words(random, 30), f"tenant {turn}"), 10)
        predictor.learn(asking(wordy + words(random, 30), f"tenant {turn}"), 1000)
    guesses = [predictor.predict(asking(opening + words(random, 2000), "new")) for opening in (brief, wordy)]
    assert guesses[1] > 10 * guesses[0]


@pytest.mark.parametrize("seed", range(3))
def test_when_who_was_brief_becomes_wordy_the_order_follows(seed: int) -> None:
    before = traffic(by_tenant_and_system_prompt, 1500, seed)
    after = traffic(by_tenant_and_system_prompt, 500, seed, is_flipped=True)
    predictions = serve(history(), before + after)[len(before) :]
    assert against_the_best(predictions[:20], after[:20]) < 0  # as was learned
    assert against_the_best(predictions[200:], after[200:]) >= 0.85


def test_a_tenant_that_is_one_in_fifty_is_known_for_what_it_is() -> None:
    predictor = history()
    for turn in range(1000):
        is_rare = turn % 50 == 0
        predictor.learn(asking([7] * 10, "rare" if is_rare else "usual"), 2000 if is_rare else 5)
    assert 1000 < predictor.predict(asking([7] * 10, "rare")) < 4000
    assert 4 <= predictor.predict(asking([7] * 10, "usual")) <= 6


def test_an_answer_that_was_cut_counts_as_at_least_so_long() -> None:
    predictor = history()
    for turn in range(400):
        limit = 16 if turn % 4 else 4096
        predictor.learn(asking([7] * 10, params=SamplingParams(max_tokens=limit)), min(1000, limit))
    # A plain average of what was seen would be below 50.
    assert predictor.predict(asking([7] * 10, params=SamplingParams(max_tokens=2048))) > 400


def test_nothing_is_learned_from_answers_that_could_not_end_by_themselves() -> None:
    predictor = history()
    for _ in range(50):
        predictor.learn(plain("benchmark", ignore_eos=True, max_tokens=5000), 5000)
        predictor.learn(plain("usual", max_tokens=8000), 20)
    assert predictor.predict(plain("usual", max_tokens=8000)) < 40
    assert predictor.predict(asking([9] * 500, "new")) < 40


# ---- what bounds it


def test_before_anything_is_learned_all_are_alike_but_for_their_limits() -> None:
    predictor = history()
    prompts = [[7], [7] * 100, [9] * 3]
    assert len({predictor.predict(asking(prompt)) for prompt in prompts}) == 1
    assert predictor.predict(asking([7], params=SamplingParams(max_tokens=5))) == 5


@pytest.mark.parametrize("name", PREDICTORS)
def test_no_prediction_goes_beyond_max_tokens_or_the_context(name: str) -> None:
    predictor = PREDICTORS[name](100)
    for _ in range(50):
        predictor.learn(asking([7] * 10), 90)
    assert predictor.predict(asking([7] * 10, params=SamplingParams(max_tokens=20), known=90)) == 20
    assert predictor.predict(asking([7] * 95, known=90)) == 5
    assert predictor.predict(asking([7] * 100, known=90)) == 1


def test_who_asks_for_a_least_length_or_for_no_end_is_taken_at_their_word() -> None:
    predictor = history()
    for _ in range(50):
        predictor.learn(asking([7] * 10), 3)
    assert predictor.predict(plain("a", min_tokens=100, max_tokens=500)) == 100
    assert predictor.predict(plain("b", ignore_eos=True, max_tokens=500)) == 500
    assert predictor.predict(plain("c", ignore_eos=True, stop="end", max_tokens=500)) < 10


def test_max_tokens_predicts_all_that_is_left_and_the_oracle_what_it_knows() -> None:
    max_tokens, oracle = PREDICTORS["max_tokens"](100), PREDICTORS["oracle"](100)
    assert max_tokens.predict(asking([7] * 10, known=5)) == oracle.predict(asking([7] * 10)) == 90
    assert oracle.predict(asking([7] * 10, known=5)) == 5


requests = st.builds(
    asking,
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    tenant=st.sampled_from(["", "a", "\ud800"]),  # JSON can carry half a character
    endpoint=st.sampled_from(["", "chat"]),
    params=st.builds(SamplingParams, max_tokens=st.none() | st.integers(1, 200), ignore_eos=st.booleans()),
    known=st.none() | st.integers(0, 500),
)


@given(name=st.sampled_from(list(PREDICTORS)), served=st.lists(st.tuples(requests, st.integers(0, 500)), max_size=60))
@settings(deadline=None)
def test_whatever_was_learned_a_prediction_is_from_1_to_the_limit(name: str, served: list[tuple[Request, int]]) -> None:
    predictor = PREDICTORS[name](64)
    for request, length in served:
        limit = min(request.params.max_tokens or 64, 64 - len(request.prompt))
        assert 1 <= predictor.predict(request) <= limit
        predictor.learn(request, length)


@pytest.mark.long
def test_hostile_prompts_take_no_more_memory_than_the_tables_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKETS", 64)
    monkeypatch.setattr(module, "REMEMBERED", 64)
    predictor, random = history(), Random(0)

    def attack(number: int) -> int:
        for turn in range(number):
            request = asking(words(random, 20 + turn % 100), f"tenant {random.random()}", f"endpoint {random.random()}")
            predictor.predict(request)
            if turn % 2:  # every other one is aborted
                predictor.learn(request, random.randrange(1, 1000))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        full = attack(1500)  # the window of finished requests is full too
        assert attack(3000) < 1.1 * full
    finally:
        tracemalloc.stop()


def test_who_is_seen_often_outlasts_a_flood_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKETS", 64)
    predictor, random = history(), Random(0)
    for turn in range(1000):
        predictor.learn(asking(words(random, 20), f"stranger {turn}"), 10)
        if turn % 10 == 0:
            assert turn < 200 or predictor.predict(asking([7] * 20, "regular")) > 500
            predictor.learn(asking([7] * 20, "regular"), 1000)


def test_two_processes_predict_the_same() -> None:
    program = "from test_predictor import *\nprint(*(serve(history(), traffic(make, 100, 0)) for make in MAKERS))\n"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": salt, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(outputs) == 1


# ---- when it is believed


def tell(predictor: Predictor, pairs: Iterable[tuple[int, int]]) -> None:
    """Finish requests for which an oracle was told the first length, and the second came."""
    for guess, length in pairs:
        request = asking([7], known=guess)
        predictor.predict(request)
        predictor.learn(request, length)


upright = [(length, length) for length in range(1, 1 + ENOUGH)]
inverted = [(length, 1000 - length) for length in range(1, 1 + ENOUGH)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=60))
@example([(1, 10), (2, 20), (3, 20), (4, 90)])
@settings(deadline=None)
def test_the_correlation_is_spearmans_with_ties_sharing_their_ranks(pairs: list[tuple[int, int]]) -> None:
    left, right = [list(side) for side in zip(*pairs, strict=True)]
    if len(set(left)) == 1 or len(set(right)) == 1:
        assert spearman(left, right) is None
    else:
        assert spearman(left, right) == pytest.approx(reference(left, right))


def test_the_correlation_is_unknown_until_enough_have_finished() -> None:
    predictor = PREDICTORS["oracle"](CONTEXT)
    tell(predictor, upright[:-1])
    assert predictor.correlation is None
    tell(predictor, upright[-1:])
    assert predictor.correlation == pytest.approx(1.0)


def test_the_correlation_is_that_of_the_last_finished_requests_as_predicted_when_they_came() -> None:
    predictor = history()
    arrivals = traffic(by_tenant_and_system_prompt, ENOUGH + 3 * STRIDE, 0)
    predictions = serve(predictor, arrivals)
    lengths = [arrival.length for arrival in arrivals]
    assert len(arrivals) > WINDOW
    assert predictor.correlation == pytest.approx(reference(predictions[-WINDOW:], lengths[-WINDOW:]))


def test_aborted_requests_are_not_scored_even_if_another_takes_their_name() -> None:
    predictor = PREDICTORS["oracle"](CONTEXT)
    for guess, length in upright:
        predictor.predict(Request("same", [7], NEVER_CUT, known_length=1000 - guess))
        predictor.predict(Request("same", [7], NEVER_CUT, known_length=guess))
        predictor.learn(Request("same", [7], NEVER_CUT), length)
    assert predictor.correlation == pytest.approx(1.0)


def test_of_several_answers_to_a_request_one_is_scored_and_all_are_learned_from() -> None:
    predictor = history()
    for _ in range(ENOUGH - 1):
        request = asking([7], params=SamplingParams(n=2, max_tokens=None))
        predictor.predict(request)
        predictor.learn(request, 10)
        predictor.learn(request, 1000)
    assert predictor.correlation is None
    assert 50 < predictor.predict(asking([7])) < 200  # 100 lies in the middle


def test_a_predictor_that_is_upside_down_loses_trust_and_wins_it_back_by_itself() -> None:
    predictor = PREDICTORS["oracle"](CONTEXT)
    assert predictor.is_trusted
    tell(predictor, inverted)
    assert predictor.correlation == pytest.approx(-1.0)
    assert not predictor.is_trusted
    tell(predictor, upright * (WINDOW // ENOUGH + STRIDE // ENOUGH))
    assert predictor.correlation == pytest.approx(1.0)
    assert predictor.is_trusted


def test_a_predictor_no_better_than_chance_is_believed_nearly_always() -> None:
    random, verdicts = Random(0), []
    predictor = PREDICTORS["oracle"](CONTEXT)
    for _ in range(100):
        tell(predictor, ((random.randrange(1, 500), random.randrange(1, 500)) for _ in range(STRIDE)))
        verdicts.append(predictor.is_trusted)
    assert verdicts.count(False) <= 10


def test_where_all_predictions_are_the_same_there_is_nothing_to_distrust() -> None:
    predictor = PREDICTORS["max_tokens"](CONTEXT)
    tell(predictor, inverted)
    assert predictor.correlation is None
    assert predictor.is_trusted
