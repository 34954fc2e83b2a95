"""A suffix: the prompt that families of code models were trained on."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from chairlift.core.errors import RequestError
from chairlift.text.infill import fill_in
from chairlift.text.tokenizer import Tokenizer


def with_tokens(*tokens: str) -> Tokenizer:
    backend = Backend(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = ByteLevel()
    backend.add_tokens([AddedToken(token, special=True) for token in tokens])
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>x<fim_suffix>y<fim_middle>"),
        (("[SUFFIX]", "[PREFIX]"), "[SUFFIX]y[PREFIX]x"),
    ],
)
def test_the_answer_comes_between(tokens: tuple[str, ...], expected: str) -> None:
    assert fill_in("x", "y", with_tokens(*tokens)) == expected


def test_a_model_without_such_tokens_is_named_as_the_reason() -> None:
    with pytest.raises(RequestError, match="suffix needs a model with fill-in-the-middle tokens"):
        fill_in("x", "y", with_tokens("<fim_prefix>"))
