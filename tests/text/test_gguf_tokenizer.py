"""A tokenizer rebuilt from GGUF metadata gives the ids of the one it was converted from."""

import json
import time
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import CHAT_TEMPLATE, GPT2_WORDS, TEXTS, byte_level, sentencepiece
from tokenizers import Regex, normalizers, pre_tokenizers

from chairlift.core.errors import ModelError
from chairlift.models.gguf import GgufFile
from chairlift.models.sources import resolve
from chairlift.text.tokenizer import Tokenizer

ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def metadata_of(backend: tokenizers.Tokenizer, **extra: Any) -> dict[str, Any]:
    """What a conversion to GGUF writes for this tokenizer."""
    model = json.loads(backend.to_str())["model"]
    added = backend.get_added_tokens_decoder()
    tokens = sorted(backend.get_vocab(), key=backend.token_to_id)
    keys = {
        "tokens": tokens,
        "token_type": [1 if id not in added else 3 if added[id].special else 4 for id in range(len(tokens))],
        "merges": [" ".join(merge) for merge in model["merges"]],
        **extra,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentencepiece_metadata(backend: tokenizers.Tokenizer, **extra: Any) -> dict[str, Any]:
    metadata = metadata_of(backend, model="llama", **extra)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    types[0] = 2
    types[3:259] = [6] * 256
    metadata["tokenizer.ggml.scores"] = [float(259 - id) for id in range(len(tokens))]
    del metadata["tokenizer.ggml.merges"]
    return metadata


@pytest.mark.parametrize(
    ("pre", "cuts", "normalizer"),
    [
        ("gpt-2", [pre_tokenizers.Split(Regex(GPT2_WORDS), "isolated")], None),
        (
            "smollm",
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Split(Regex(GPT2_WORDS), "isolated")],
            None,
        ),
        ("qwen2", [pre_tokenizers.Split(Regex(ENGLISH + WORDS % ""), "isolated")], normalizers.NFC()),
        ("dbrx", [pre_tokenizers.Split(Regex(ENGLISH + WORDS % "{1,3}"), "isolated")], None),
    ],
)
def test_a_byte_level_vocabulary_from_gguf_gives_the_original_ids(
    pre: str, cuts: list[pre_tokenizers.PreTokenizer], normalizer: normalizers.Normalizer | None
) -> None:
    original = byte_level(*cuts)
    if normalizer is not None:
        original.normalizer = normalizer
    tokenizer = Tokenizer.from_gguf(metadata_of(original, model="gpt2", pre=pre, bos_token_id=0, eos_token_id=1))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.special_ids) == ("<|begin|>", "<|end|>", {0, 1})

    @given(st.text())
    def agrees(text: str) -> None:
        assert tokenizer.encode(text) == original.encode(text).ids

    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == original.decode(original.encode(text).ids)
    agrees()


def test_llama3_takes_whole_words_first_and_adds_bos() -> None:
    original = byte_level(pre_tokenizers.Split(Regex(ENGLISH + WORDS % "{1,3}"), "isolated"))
    metadata = metadata_of(original, model="gpt2", pre="llama-bpe", bos_token_id=0)
    metadata["tokenizer.ggml.merges"] = []
    tokenizer = Tokenizer.from_gguf(metadata)
    assert original.token_to_id("Ġchair") is not None
    assert tokenizer.encode(" chair") == [0, original.token_to_id("Ġchair")]
    assert len(tokenizer.encode(" chairs", add_special_tokens=False)) == len(" chairs")


def merge_by_score(text: str, vocabulary: dict[str, int], scores: list[float], types: list[int]) -> list[int]:
    """SentencePiece's BPE, in its plainest form: join the neighbours with the best-scored sum, the leftmost first."""
    symbols = list(("▁" + text).replace(" ", "▁")) if text else []

    def score(i: int) -> float:
        id = vocabulary.get(symbols[i] + symbols[i + 1])
        return scores[id] if id is not None and types[id] == 1 else float("-inf")

    while len(symbols) > 1 and score(best := max(range(len(symbols) - 1), key=score)) > float("-inf"):
        symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
    pieces = [[s] if s in vocabulary else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
    return [vocabulary[piece] for symbol in pieces for piece in symbol]


def test_a_sentencepiece_vocabulary_from_gguf_merges_by_score() -> None:
    metadata = sentencepiece_metadata(sentencepiece())
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in (text for text in TEXTS if "<s>" not in text):
        expected = merge_by_score(text, vocabulary, scores, metadata["tokenizer.ggml.token_type"])
        assert tokenizer.encode(text) == [1, *expected]
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


def test_a_sentencepiece_vocabulary_may_go_without_the_space_prefix() -> None:
    extra = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(sentencepiece(), **extra))
    ids = tokenizer.encode("the chair")
    assert tokenizer.token_text(ids[0]).startswith("t")
    assert ids[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.decode(tokenizer.encode(" the chair")) == " the chair"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "klingon"}, "'klingon' is not known; known are .*smollm"),
        ({"model": "t5"}, "'t5'; known are 'gpt2' and 'llama'"),
        ({"tokens": ["a", "b", "a"]}, "the token 'a' twice"),
        ({"token_type": [1, 1]}, "2 token types"),
        ({"merges": ["x yz"]}, "is inconsistent"),
    ],
)
def test_a_gguf_tokenizer_that_cannot_work_says_why(change: dict[str, Any], message: str) -> None:
    metadata = metadata_of(byte_level(), model="gpt2", pre="gpt-2")
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    if "tokens" in change:
        del metadata["tokenizer.ggml.token_type"]
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(metadata)


def test_a_gguf_file_without_a_tokenizer_says_so() -> None:
    with pytest.raises(ModelError, match="carries no tokenizer"):
        Tokenizer.from_gguf({"general.architecture": "llama"})


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    metadata = GgufFile(resolve("smollm2-135m")).metadata
    begun = time.perf_counter()
    tokenizer = Tokenizer.from_gguf(metadata)
    assert time.perf_counter() - begun < 5  # a fifth of a second alone; the margin is for a machine that is shared
    return tokenizer


def test_the_default_model_has_its_known_ids(smollm: Tokenizer) -> None:
    assert (smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_id) == (49152, 1, 2)
    assert smollm.special_ids == frozenset(range(17))
    assert smollm.encode("<|im_start|>user\nhi<|im_end|>\n") == [1, 4093, 198, 6004, 2, 198]
    assert smollm.encode("Hello world 12345") == [19556, 905, 216, 33, 34, 35, 36, 37]
    assert smollm.chat_template is not None


def test_the_default_model_reads_back_what_it_writes(smollm: Tokenizer) -> None:
    for text in TEXTS:
        assert smollm.decode(smollm.encode(text), skip_special_tokens=False) == text


def test_the_chat_template_comes_with_the_tokenizer() -> None:
    metadata = metadata_of(byte_level(), model="gpt2", pre="gpt-2") | {"tokenizer.chat_template": CHAT_TEMPLATE}
    assert Tokenizer.from_gguf(metadata).chat_template == CHAT_TEMPLATE
