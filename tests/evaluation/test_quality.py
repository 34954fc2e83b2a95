"""`bench quality` compares every way to store a model with the unquantized one."""

from pathlib import Path

import pytest

from chairlift.core.errors import ChairliftError
from chairlift.evaluation import quality
from chairlift.ops.kv_quant import KV_DTYPES

WORDS = "the answer to the question " * 100


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TEXT_TOKENS": 400, "PROMPT_TOKENS": 40, "CONTEXT": 100, "BATCH": 6, "LENGTH": 512}.items():
        monkeypatch.setattr(quality, name, value)


def test_a_kv_dtype_is_compared_with_the_model_s_own(tiny_model: Path) -> None:
    exact, narrow = quality.measure(str(tiny_model), WORDS, {"dtype": "float32", "kv_dtype": "int8"}, repeat=0)
    assert [exact.name, narrow.name] == ["float32", "float32, KV int8"]
    assert narrow.perplexity == pytest.approx(exact.perplexity, rel=0.1)


@pytest.mark.long
def test_rounding_while_loading_is_compared_with_the_model_as_it_is(tiny_model: Path) -> None:
    found = quality.measure(str(tiny_model), WORDS, {"quantization": "int8", "kv_dtype": "int8"}, repeat=0)
    assert [each.name for each in found] == ["float32", "int8", "int8, KV int8"]
    exact, own, _ = found
    assert own.weight_bytes < exact.weight_bytes and own.perplexity != exact.perplexity
    assert own.perplexity == pytest.approx(exact.perplexity, rel=0.1)


@pytest.mark.long
def test_every_kv_dtype_is_compared_with_the_model_s_own(tiny_model: Path) -> None:
    found = quality.measure(str(tiny_model), WORDS, {"dtype": "float32"}, repeat=2)
    names = ["float32", *(f"float32, KV {kv_dtype}" for kv_dtype in KV_DTYPES)]
    assert [each.name for each in found] == names
    exact, *narrow = found
    for each in narrow:
        assert each.perplexity == pytest.approx(exact.perplexity, rel=0.1)
        assert each.bytes_per_token < exact.bytes_per_token / 3
        assert each.weight_bytes == exact.weight_bytes
        assert len(each.speeds) == 2
        assert len(each.likeliest) == 399
    assert [column.header for column in quality.quality_table(found, "tiny").columns] == ["", *names]


@pytest.mark.long
def test_a_quantized_file_is_compared_with_itself_in_float32() -> None:
    """The default model's file keeps its tokens in most places, at a sixth of the bytes."""
    text = quality.TEXT.read_text()
    found = quality.measure("smollm2-135m", text, {"kv_dtype": "int8"}, repeat=0)
    assert [each.name for each in found] == ["float32", "auto", "auto, KV int8"]
    exact, own, _ = found
    assert own.weight_bytes < exact.weight_bytes / 5
    assert own.perplexity == pytest.approx(exact.perplexity, rel=0.03)
    same = sum(a == b for a, b in zip(own.likeliest, exact.likeliest, strict=True)) / len(exact.likeliest)
    assert same > 0.9
    assert quality.quality_table(found, "default").row_count == 6  # without speeds


@pytest.mark.long
def test_the_reference_must_have_the_same_tokens(tiny_model: Path) -> None:
    with pytest.raises(ChairliftError, match="split the text into other tokens"):
        quality.measure(str(tiny_model), quality.TEXT.read_text()[:2000], {}, repeat=0, reference="smollm2-135m")
