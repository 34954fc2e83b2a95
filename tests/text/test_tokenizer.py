"""The tokenizer of a folder gives the ids and texts that transformers gives."""

from pathlib import Path

import pytest
from small_tokenizers import CHAT_TEMPLATE, CORPUS, TEXTS, byte_level, save, sentencepiece
from tokenizers import decoders
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from chairlift.core.errors import ModelError, RequestError
from chairlift.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("special", [True, False])
def test_it_encodes_as_transformers_does(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerBase, special: bool
) -> None:
    expected = [reference.encode(text, add_special_tokens=special) for text in TEXTS]
    assert [tokenizer.encode(text, special) for text in TEXTS] == expected
    assert tokenizer.encode_batch(TEXTS, special) == expected


@pytest.mark.parametrize("skip", [True, False])
def test_it_decodes_as_transformers_does(tokenizer: Tokenizer, reference: PreTrainedTokenizerBase, skip: bool) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_it_knows_the_special_tokens(tokenizer: Tokenizer, reference: PreTrainedTokenizerBase) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token) == (reference.bos_token, reference.eos_token)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)
    assert tokenizer.special_ids == frozenset(reference.all_special_ids)
    assert tokenizer.vocab_size == len(reference)


def test_the_bytes_of_the_tokens_are_the_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        spelled = b"".join(map(tokenizer.token_bytes, ids)).decode()
        # SentencePiece begins a text with a space of its own, which decoding takes away.
        assert tokenizer.decode(ids, skip_special_tokens=False) in (spelled, spelled.removeprefix(" "))


def test_a_token_that_is_no_whole_character_shows_as_a_replacement(tokenizer: Tokenizer) -> None:
    first = next(id for id in tokenizer.encode("🎿", add_special_tokens=False) if b"\xf0" in tokenizer.token_bytes(id))
    assert tokenizer.token_text(first).endswith("\ufffd")
    assert tokenizer.token_text(tokenizer.vocab_size + 7) == ""


def test_flags_in_the_config_decide_on_bos_and_eos_where_the_file_is_silent(tmp_path: Path) -> None:
    flags = {"add_bos_token": True, "add_eos_token": True}
    ids = byte_level().encode("a skier").ids
    save(tmp_path, byte_level(), bos_token="<|begin|>", eos_token="<|end|>", **flags)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a skier") == [0, *ids, 1]
    assert tokenizer.encode("a skier", add_special_tokens=False) == ids


def test_the_file_decides_on_bos_and_eos_where_it_speaks(tmp_path: Path) -> None:
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": False,
        "add_eos_token": True,
    }
    save(tmp_path, sentencepiece(), tokenizer_class="PreTrainedTokenizerFast", **names)
    tokenizer, reference = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("a skier") == reference.encode("a skier") == sentencepiece().encode("a skier").ids


def test_tokens_named_only_in_the_config_are_added(tmp_path: Path) -> None:
    config = {
        "bos_token": "<|begin|>",
        "eos_token": "<|new|>",
        "additional_special_tokens": ["<|more|>", {"__type": "AddedToken", "content": "<|most|>", "lstrip": True}],
        "added_tokens_decoder": {"1234": {"content": "<call>", "special": False, "normalized": False}},
    }
    save(tmp_path, byte_level(), tokenizer_class="PreTrainedTokenizerFast", **config)
    tokenizer, reference = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "a<|more|>b <|most|>c<call>d<|new|>"
    assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == "abc<call>d"  # <|most|> eats the space before it


def test_the_special_tokens_map_is_read_where_the_config_is_silent(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
    assert Tokenizer.from_folder(tmp_path).eos_token_id == 1


def test_stored_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_folder(save(tmp_path, backend))
    assert tokenizer.encode(CORPUS[0]) == byte_level().encode(CORPUS[0]).ids


def test_the_template_file_wins_over_the_config(tmp_path: Path) -> None:
    save(
        tmp_path,
        byte_level(),
        chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
    )
    assert Tokenizer.from_folder(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert Tokenizer.from_folder(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("F\n")
    assert Tokenizer.from_folder(tmp_path).chat_template == "F\n"


def test_a_folder_without_a_tokenizer_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_a_lone_surrogate_is_the_clients_mistake(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode("half a \ud83d face")


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(backend)


def test_the_chat_template_comes_with_the_tokenizer(byte_level_folder: Path) -> None:
    assert Tokenizer.from_folder(byte_level_folder).chat_template == CHAT_TEMPLATE
