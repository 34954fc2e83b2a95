"""Folders of small tokenizers, as the tests of this directory share them."""

from pathlib import Path

import pytest
from small_tokenizers import CHAT_TEMPLATE, GPT2_WORDS, byte_level, save, sentencepiece
from tokenizers import Regex, pre_tokenizers

from chairlift.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        tmp_path_factory.mktemp("byte-level"),
        byte_level(pre_tokenizers.Split(Regex(GPT2_WORDS), "isolated")),
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|begin|>",
        eos_token={"__type": "AddedToken", "content": "<|end|>", "special": True},
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        tmp_path_factory.mktemp("sentencepiece"),
        sentencepiece(),
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


@pytest.fixture(scope="session", params=["byte_level_folder", "sentencepiece_folder"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)
