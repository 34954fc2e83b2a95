"""What streams out, put together, is what decoding gives; and nothing of a stop string ever shows."""

import codecs
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import CORPUS, TEXTS, sentencepiece
from tokenizers import decoders, models, pre_tokenizers

from chairlift.core.errors import RequestError
from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.tokenizer import Tokenizer

unicode_texts = st.text(max_size=60) | st.text(st.sampled_from("aé日🎿 \n\ufffd"), max_size=60)
# Few letters, so that stop strings are found, overlap, and begin within one another.
stop_strings = st.lists(st.text(st.sampled_from("ab é\n"), min_size=1, max_size=4), max_size=3)
stoppable_texts = st.text(st.sampled_from("ab é\n"), max_size=40)


@pytest.fixture(scope="module")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder)


@pytest.fixture(scope="module")
def byte_fallback(sentencepiece_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(sentencepiece_folder)


def split(data: st.DataObject, ids: Sequence[int]) -> list[Sequence[int]]:
    """Cut a sequence into steps, as an engine delivers it."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def stable_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The whole characters after each token, decoded from the start each time."""
    texts = []
    for end in range(len(ids) + 1):
        shown = [tokenizer.token_bytes(id) for id in ids[:end] if id not in tokenizer.special_ids]
        if shown:
            shown[0] = tokenizer.pieces.open(shown[0])
        texts.append(codecs.getincrementaldecoder("utf-8")(tokenizer.pieces.errors).decode(b"".join(shown)))
    return texts


def first_stop(texts: Sequence[str], stops: Sequence[str], min_tokens: int) -> tuple[int, int, str] | None:
    """The first token that completes a stop string, where that begins, and which it is."""
    for count in range(max(1, min_tokens + 1), len(texts)):
        seen, text = len(texts[count - 1]), texts[count]
        matches = [
            (start, len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > seen
        ]
        if matches:
            start, _, stop = min(matches)
            return count, start, stop
    return None


@given(text=unicode_texts, skip=st.booleans(), data=st.data())
def test_the_pieces_add_up_to_the_decoded_text(
    tokenizer: Tokenizer, text: str, skip: bool, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text)
    reader = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [reader.push(step) for step in split(data, ids)]
    pieces.append(reader.finish())
    assert "".join(pieces) == reader.text == tokenizer.decode(ids, skip)


@given(data=st.data())
def test_any_tokens_at_all_add_up_to_the_decoded_text(byte_level: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 3), max_size=40))  # some outside the vocabulary
    reader = IncrementalDetokenizer(byte_level)
    assert "".join(reader.push(step) for step in split(data, ids)) + reader.finish() == byte_level.decode(ids)


@given(data=st.data())
def test_with_byte_fallback_only_the_broken_bytes_are_replaced(byte_fallback: Tokenizer, data: st.DataObject) -> None:
    broken_or_not = st.sampled_from([*range(3, 259), *byte_fallback.encode("a é 🎿 chair")] * 2 + list(range(259, 300)))
    ids = data.draw(st.lists(broken_or_not, max_size=30))
    reader = IncrementalDetokenizer(byte_fallback)
    streamed = "".join(reader.push(step) for step in split(data, ids)) + reader.finish()
    decoded = byte_fallback.decode(ids)
    if "\ufffd" not in decoded:
        assert streamed == decoded
    spelled = b"".join(byte_fallback.token_bytes(id) for id in ids if id not in byte_fallback.special_ids)
    each_byte = spelled.decode(errors="surrogateescape")
    expected = "".join("\ufffd" if "\udc80" <= character <= "\udcff" else character for character in each_byte)
    assert streamed == expected.removeprefix(" ")


@given(text=unicode_texts, data=st.data())
def test_the_output_goes_on_where_the_prompt_ends(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    before = stable_texts(tokenizer, ids[:cut])[-1]
    reader = IncrementalDetokenizer(tokenizer, prompt_ids=ids[:cut])
    assert before + reader.push(ids[cut:]) + reader.finish() == tokenizer.decode(ids)


@settings(max_examples=300)
@given(
    text=stoppable_texts,
    stops=stop_strings,
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    data=st.data(),
)
def test_the_text_ends_at_the_first_stop_string(
    tokenizer: Tokenizer, text: str, stops: list[str], include: bool, min_tokens: int, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text)
    texts = stable_texts(tokenizer, ids)
    match = first_stop(texts, stops, min_tokens)
    count, start, stop = match or (None, len(texts[-1]), None)
    expected = texts[-1][:start] + (stop if include and stop else "")
    reader = IncrementalDetokenizer(tokenizer, stop=stops, include_stop=include, min_tokens=min_tokens)
    shown = ""
    for step in split(data, ids):
        shown += reader.push(step)
        assert expected.startswith(shown)
    assert shown + reader.finish() == reader.text == expected
    assert (reader.stopped, reader.stop_tokens) == (stop, count)
    assert reader.push(ids) == "" or stop is None


@given(text=stoppable_texts, stops=stop_strings)
def test_no_more_is_held_back_than_could_become_a_stop_string(
    tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    ids = tokenizer.encode(text)
    reader = IncrementalDetokenizer(tokenizer, stop=stops)
    for id, stable in zip(ids, stable_texts(tokenizer, ids)[1:], strict=True):
        reader.push([id])
        if reader.stopped is not None:
            break
        held = [n for n in range(1, len(stable) + 1) for s in stops if len(s) > n and s.startswith(stable[-n:])]
        assert len(reader.text) == len(stable) - max(held, default=0)


def test_a_character_shows_only_when_its_last_byte_has_come(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🛷", add_special_tokens=False)
    reader = IncrementalDetokenizer(tokenizer)
    pieces = [reader.push([id]) for id in ids]
    assert "".join(pieces[:-1]) == "x"
    assert pieces[-1] == "🛷"
    assert reader.finish() == ""


def test_a_character_that_never_ends_is_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🛷", add_special_tokens=False)[:-1]
    reader = IncrementalDetokenizer(tokenizer)
    assert reader.push(ids) == "x"
    assert reader.finish() == tokenizer.decode(ids)[1:]
    assert reader.text.endswith("\ufffd")


def test_a_stop_string_may_span_tokens_and_its_beginning_never_shows(tokenizer: Tokenizer) -> None:
    reader = IncrementalDetokenizer(tokenizer, stop=("skier:",))
    ids = tokenizer.encode(CORPUS[0], add_special_tokens=False)
    for id in ids:
        reader.push([id])
        assert "The chairlift never stops for one ".startswith(reader.text)
    assert reader.stopped == "skier:"
    assert reader.stop_tokens is not None
    assert "skier:" in tokenizer.decode(ids[: reader.stop_tokens])
    assert "skier:" not in tokenizer.decode(ids[: reader.stop_tokens - 1])


def test_a_stop_string_of_broken_bytes_is_found_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab🛷", add_special_tokens=False)[:-1]
    reader = IncrementalDetokenizer(tokenizer, stop=("b\ufffd",))
    assert reader.push(ids) + reader.finish() == "a"
    assert (reader.stopped, reader.stop_tokens) == ("b\ufffd", len(ids))


def test_special_tokens_show_only_when_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_id is not None
    ids = [*tokenizer.encode("chair", add_special_tokens=False), tokenizer.eos_token_id]
    hiding, showing = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert hiding.push(ids) + hiding.finish() == "chair"
    assert showing.push(ids) + showing.finish() == f"chair{tokenizer.eos_token}"


@pytest.mark.parametrize("stop", [("a", ""), "abc"])
def test_a_stop_string_that_makes_no_sense_is_refused(tokenizer: Tokenizer, stop: Sequence[str]) -> None:
    with pytest.raises(RequestError, match="stop strings must be"):
        IncrementalDetokenizer(tokenizer, stop=stop)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decoders_are_read_too(scheme: str) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"▁": 0, "▁▁": 1, "a": 2, "▁a": 3, "b": 4, "<s>": 5}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend)

    @given(st.lists(st.integers(0, 6), max_size=8), st.booleans())
    def agrees(ids: list[int], skip: bool) -> None:
        reader = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        assert "".join(reader.push([id]) for id in ids) + reader.finish() == tokenizer.decode(ids, skip)

    agrees()


def test_a_long_text_costs_no_more_per_token_than_a_short_one() -> None:
    tokenizer = Tokenizer(sentencepiece())
    ids = tokenizer.encode(" ".join(CORPUS), add_special_tokens=False)

    def seconds_per_token(repeats: int) -> float:
        reader = IncrementalDetokenizer(tokenizer, stop=("never to be found", "nor this"))
        begun = time.process_time()
        for _ in range(repeats):
            for id in ids:
                reader.push([id])
        return (time.process_time() - begun) / (repeats * len(ids))

    assert seconds_per_token(100) < 5 * min(seconds_per_token(5) for _ in range(3))


def test_every_text_of_ours_streams_whole(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        reader = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        assert "".join(reader.push([id]) for id in ids) + reader.finish() == tokenizer.decode(ids, False)
