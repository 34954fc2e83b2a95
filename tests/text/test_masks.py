"""Grammars of many answers, advanced and masked together, are what each would be alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from chairlift.core.constraint import Constraint, Reasoning, Thinking
from chairlift.core.errors import RequestError
from chairlift.core.structured import Structured
from chairlift.ops.masks import pack_masks
from chairlift.text import grammar
from chairlift.text.grammar import GrammarConstraint, Grammars, source_of
from chairlift.text.tokenizer import Tokenizer

SOURCE = source_of(
    Structured.of({"json": {"type": "array", "items": {"enum": ["one", "two", 3, None]}, "minItems": 9}})
)


@pytest.fixture
def grammars(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Grammars:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    tokenizer = Tokenizer.from_folder(tiny_model)
    return Grammars(tokenizer, tokenizer.vocab_size, [0])


def allowed(mask: bytes | memoryview) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def test_answers_advanced_together_are_in_the_state_of_answers_advanced_alone(grammars: Grammars) -> None:
    chance = random.Random(1)
    together: list[Constraint] = [grammars.constraint(SOURCE).fork() for _ in range(20)]
    alone = [each.fork() for each in together]
    for _ in range(12):
        masks = grammars.masks(together)
        assert not masks.errors
        for mask, each in zip(masks, alone, strict=True):
            assert mask is not None and allowed(mask) == allowed(each.mask() or b"")
        tokens = [chance.choice(allowed(mask or b"")) for mask in masks]
        grammars.accept(together, tokens)
        assert all(isinstance(each, GrammarConstraint) and each.advanced for each in together)
        for one, other, token in zip(together, alone, tokens, strict=True):
            one.accept(token)
            other.accept(token)
            assert one.is_complete == other.is_complete


def test_a_token_that_its_grammar_forbids_fails_its_own_answer(grammars: Grammars) -> None:
    several: list[Constraint] = [grammars.constraint(SOURCE).fork() for _ in range(16)]
    first = allowed(several[0].mask() or b"")[0]
    forbidden = next(token for token in range(64) if token not in allowed(several[0].mask() or b""))
    grammars.accept(several, [first] * 15 + [forbidden])
    for each in several[:15]:
        each.accept(first)
    with pytest.raises(RequestError, match="does not allow"):
        several[15].accept(forbidden)


def test_masks_of_several_answers_are_one_array_that_later_steps_use_again(grammars: Grammars) -> None:
    several: list[Constraint] = [grammars.constraint(SOURCE).fork() for _ in range(3)]
    for each in several:
        each.accept(allowed(each.mask() or b"")[0])  # the first mask is computed when a grammar is compiled
    expected = [allowed(each.fork().mask() or b"") for each in several]
    used = set()
    for _ in range(8):
        masks = grammars.masks(several)
        assert [allowed(mask or b"") for mask in masks] == expected
        packed = pack_masks(masks, 64)
        assert packed.data_ptr() == masks.whole.ctypes.data, "not copied"
        used.add(packed.data_ptr())
    assert len(used) == 4


def test_the_one_array_lacks_no_mask_of_reasoning_that_may_begin(grammars: Grammars) -> None:
    plain = grammars.constraint(SOURCE).fork()
    plain.accept(allowed(plain.mask())[0])
    start = next(token for token in range(64) if token not in allowed(plain.fork().mask()))
    masks = grammars.masks([Reasoning(Thinking((start,), (1,)), plain)])
    assert start in allowed(masks[0] or b"")
    assert masks.whole is None, "it is joined with the token that begins the reasoning"


def test_a_grammar_is_compiled_once_for_each_thread_and_checked_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.text.grammar._COPIED_WITHIN", 60.0)  # seconds: this machine may be busy
    structured = Structured.of({"regex": "a+b"})
    source = grammars.check(structured)
    assert grammars.check(structured) == source
    assert grammars.cached(source) is None, "there is a copy for one thread only"
    found = [grammars.constraint(source) for _ in range(12)]
    assert sorted({each.copy for each in found}) == [0, 1, 2, 3]
    assert len({id(each.matcher) for each in found}) == 4
    assert grammars.cached(source) is not None


def test_a_grammar_that_takes_long_to_compile_is_compiled_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.text.grammar._COPIED_WITHIN", 0.0)
    assert grammars.constraint(SOURCE) is grammars.constraint(SOURCE)


def test_a_grammar_whose_masks_take_long_is_refused(grammars: Grammars) -> None:
    asked = Structured.of({"json": {"type": "array", "items": {"enum": ["one", "two"]}}})
    assert grammars._slowest_mask >= 0.004
    grammars.__dict__["_slowest_mask"] = 1e-9
    with pytest.raises(
        RequestError, match="structured: json cannot be used: finding the tokens that may come next takes"
    ):
        grammars.check(asked)
    assert source_of(asked) not in grammars._compiled, "asked for again, it would be served"


def test_one_slow_mask_of_a_busy_machine_refuses_no_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seconds = grammar._step, iter([0.0, 1.0])  # of the first two masks; a walk's first does not count
    limit = grammars._slowest_mask
    monkeypatch.setattr(grammar, "_step", lambda state, chance: next(seconds, 0 * step(state, chance)))
    asked = Structured.of({"choice": ["never", "asked", "before"]})
    assert grammars.check(asked) in grammars._compiled and limit < 1
    assert next(seconds, None) is None, "the slow mask was seen"
