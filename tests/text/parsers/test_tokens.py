"""Answers as tokens of a tokenizer with the markers of a family: parsed as they stream, forced as the model writes."""

from pathlib import Path
from typing import Any

import pytest
from answers import ANSWERS
from llguidance import LLMatcher, LLTokenizer
from parsing import TOOLS, parse
from small_tokenizers import GPT2_WORDS, byte_level, save
from tokenizers import AddedToken, Regex, pre_tokenizers

from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.parsers import DIALECTS, parser_for
from chairlift.text.parsers.dialect import Dialect
from chairlift.text.parsers.grammar import special_ids
from chairlift.text.tokenizer import Tokenizer

each_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


@pytest.fixture(params=[True, False], ids=["special", "added"])
def tokenizer_of(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a function that makes a tokenizer with a dialect's markers, as special or as plain added tokens."""

    def make(dialect: Dialect) -> Tokenizer:
        backend = byte_level(pre_tokenizers.Split(Regex(GPT2_WORDS), "isolated"))
        backend.add_tokens([AddedToken(marker, special=request.param, normalized=False) for marker in dialect.kept])
        return Tokenizer.from_folder(save(tmp_path, backend, tokenizer_class="PreTrainedTokenizerFast"))

    return make


@each_dialect
def test_an_answer_streams_token_by_token(dialect: Dialect, tokenizer_of: Any) -> None:
    tokenizer: Tokenizer = tokenizer_of(dialect)
    for answer in ANSWERS[dialect.name]:
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        ids = tokenizer.encode(answer.text, add_special_tokens=False)
        pieces = [*(detokenizer.push([id]) for id in ids), detokenizer.finish()]
        message = parse(parser_for(dialect, TOOLS), *pieces)
        assert (message.content, message.calls) == (answer.content, list(answer.calls)), answer.case


@each_dialect
def test_the_markers_that_grammars_name_by_id_are_those_of_their_tokenizer(dialect: Dialect, tokenizer_of: Any) -> None:
    tokenizer: Tokenizer = tokenizer_of(dialect)
    tokens = LLTokenizer(tokenizer.backend.to_str())
    special = special_ids(tokenizer)
    for id, token in tokenizer.backend.get_added_tokens_decoder().items():
        assert (special(token.content) == id) is tokens.is_special_token(id), token.content
    assert special("no such marker") is None


@each_dialect
def test_calls_are_forced_in_the_tokens_that_the_model_writes(dialect: Dialect, tokenizer_of: Any) -> None:
    tokenizer: Tokenizer = tokenizer_of(dialect)
    tokens = LLTokenizer(tokenizer.backend.to_str())
    form = dialect.calls
    text = form.trigger + form.opening + form.before + "now" + form.after
    text += ("" if form.arguments else "{}") + form.tail + form.closing
    for required in (True, False):
        grammar = dialect.grammar(
            [type(tool)(tool.name, tool.parameters, strict=True) for tool in TOOLS],
            required=required,
            special=special_ids(tokenizer),
        )
        assert grammar is not None
        ids = tokenizer.encode(text, add_special_tokens=False)
        matcher = LLMatcher(tokens, grammar)
        assert matcher.try_consume_tokens(ids) == len(ids), matcher.get_error()
        assert matcher.is_accepting()
