"""The ngram drafter: the longest earlier match, in a sequence's own tokens, a prediction, or others' answers."""

from __future__ import annotations

import random
import time

import pytest

from chairlift.core import ngram
from chairlift.core.ngram import NgramDrafter
from chairlift.core.params import SamplingParams
from chairlift.core.request import Phase, Request, Sequence


def sequence_of(
    prompt: list[int], answer: list[int] | None = None, salt: str = "", prediction: tuple[int, ...] = ()
) -> Sequence:
    made = Sequence(Request("r", prompt, SamplingParams(), salt=salt, prediction=prediction), 0, 1 << 20)
    made.tokens += answer or []
    return made


def end(drafter: NgramDrafter, sequence: Sequence) -> None:
    drafter.propose(sequence, 8)
    sequence.phase = Phase.DONE
    drafter.ended(sequence)


def longest_match(tokens: list[int], most: int) -> list[int]:
    """The same in plain words: of all earlier places, the one with the most equal tokens before it, and the latest."""
    best, found = 0, 0
    for place in range(1, len(tokens)):
        length = 0
        while length < min(32, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= max(best, 1):
            best, found = length, place
    if not best or len(tokens) < 3:
        return []
    period = tokens[found:]
    return (period * most)[: min(most, {1: 2, 2: 4}.get(best, most))]


def test_the_tokens_behind_the_longest_match_are_proposed() -> None:
    drafter = NgramDrafter()
    #          -------- four match --------        - three, and later -          the last four
    prompt = [5, 1, 2, 3, 4, 70, 71, 72, 8, 9, 2, 3, 4, 80, 81, 82, 6, 7, 1, 2, 3, 4]
    assert drafter.propose(sequence_of(prompt), 3).tokens == [70, 71, 72]
    few = drafter.propose(sequence_of([1, 2, 6, 7, 8, 9, 1, 2]), 8)
    assert few.tokens == [6, 7, 8, 9], "two tokens, and fewer drafts"
    one = drafter.propose(sequence_of([1, 2, 6, 7, 8, 9, 5, 2]), 8)
    assert one.tokens == [6, 7], "one token"
    assert len({few.grade, one.grade, 0}) == 3, "of grades of their own"
    assert drafter.propose(sequence_of([1]), 3).tokens == []


def test_random_texts_agree_with_a_search_of_every_place() -> None:
    draw = random.Random(0)
    for _ in range(300):
        drafter, known = NgramDrafter(), draw.choices(range(3), k=draw.randint(1, 40))
        sequence = sequence_of(known[:1])
        for token in known[1:]:
            sequence.tokens.append(token)
            if draw.random() < 0.5:  # tokens come one by one or several at once
                most = draw.randint(1, 8)
                found = drafter.propose(sequence, most).tokens
                wanted = longest_match(sequence.tokens, most)
                assert found == wanted or len(sequence.tokens) > 16, (sequence.tokens, found, wanted)
                assert bool(found) == bool(wanted), "only so many places are compared, but the latest always is"


def test_a_text_that_repeats_itself_is_continued_over_its_end() -> None:
    assert NgramDrafter().propose(sequence_of([9, 1, 2, 1, 2, 1, 2]), 5).tokens == [1, 2, 1, 2, 1]


def test_a_prediction_is_proposed_from_its_first_token_on() -> None:
    drafter, sequence = NgramDrafter(), sequence_of([1, 2, 3], prediction=(20, 21, 22, 23, 24))
    assert drafter.propose(sequence, 3).tokens == [20, 21, 22]
    sequence.tokens += [20, 21]
    assert drafter.propose(sequence, 8).tokens == [22, 23, 24], "up to its end"
    sequence.tokens += [60, 22, 23]
    assert drafter.propose(sequence, 8).tokens == [24], "up to its end behind two tokens, too"
    sequence.tokens += [21, 22, 23]
    assert drafter.propose(sequence, 8).tokens == [24], "it goes on after a change"


def test_answers_are_found_by_later_requests_with_the_same_salt_alone() -> None:
    drafter = NgramDrafter()
    end(drafter, sequence_of([1, 2, 3], [30, 31, 32, 33, 34], salt="a"))
    assert drafter.propose(sequence_of([7, 30, 31, 32], salt="a"), 8).tokens == [33, 34], "not over the answer's end"
    assert drafter.propose(sequence_of([1, 2, 3], salt="a"), 2).tokens == [30, 31], "after the same end of a prompt"
    assert drafter.propose(sequence_of([7, 30, 31, 32], salt="b"), 8).tokens == []
    assert drafter.propose(sequence_of([7, 30, 31, 32]), 8).tokens == []
    mine = sequence_of([30, 31, 32, 50, 30, 31, 32], salt="a")
    assert drafter.propose(mine, 1).tokens == [50], "its own tokens come first"


def test_recent_answers_and_salts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_SHARED", 100)
    drafter = NgramDrafter()
    for number in range(100):
        end(drafter, sequence_of([1, 2, 3], list(range(100 * number, 100 * number + 50))))
    [generations] = drafter._shared.values()
    assert sum(len(each.tokens) for each in generations) <= 2 * (100 + 54)
    assert drafter.propose(sequence_of([9900, 9901, 9902]), 1).tokens == [9903]
    assert drafter.propose(sequence_of([100, 101, 102]), 1).tokens == [], "too long ago"
    drafter = NgramDrafter()
    for number in range(200):
        end(drafter, sequence_of([1, 2, 3], [4, 5, 6], salt=str(number)))
    assert len(drafter._shared) == ngram._SALTS and not drafter._texts


def test_a_long_prompt_is_indexed_over_several_steps_and_then_found() -> None:
    prompt = [*range(10, 9000), 10, 11, 12]
    drafter, sequence = NgramDrafter(), sequence_of(prompt)
    found = [drafter.propose(sequence, 2).tokens for _ in range(6)]
    assert found == [[]] * 4 + [[13, 14]] * 2


def test_a_proposal_takes_microseconds_whatever_the_length() -> None:
    """The bound is far above the 3 to 10 us of an idle machine, and far below a search of the whole text."""
    draw = random.Random(0)
    words = [draw.choices(range(1000), k=8) for _ in range(200)]
    text = [token for _ in range(12_000) for token in draw.choice(words)]
    drafter, sequence = NgramDrafter(), sequence_of(text)
    while not drafter.propose(sequence, 8).tokens:
        pass
    took = []
    for _ in range(300):
        sequence.tokens.append(draw.choice(words)[0])
        begun = time.perf_counter()
        drafter.propose(sequence, 8)
        took.append(time.perf_counter() - begun)
    assert sorted(took)[150] < 200e-6
