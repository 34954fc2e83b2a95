"""Text to token ids and back, on the `tokenizers` library."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from chairlift.core.errors import ModelError, RequestError
from chairlift.text import gguf_tokenizer
from chairlift.text.pieces import Pieces

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's vocabulary: ids for text, text for ids, and the chat template that came with it.

    >>> ggml = {"model": "gpt2", "pre": "gpt-2", "tokens": ["h", "i", "hi", "!"], "merges": ["h i"]}
    >>> tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in ggml.items()})
    >>> tokenizer.encode("hi!")
    [2, 3]
    >>> tokenizer.decode([2, 3])
    'hi!'
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()  # a training setup may be stored with the vocabulary; serving never cuts or pads
        backend.no_padding()
        self.backend = backend
        self.pieces = Pieces.of(backend.decoder)
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token = pad_token  # nothing is padded here; clients that use the tokenizer from afar may want it
        self.chat_template = chat_template
        self.special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        """Read tokenizer.json and what stands beside it, giving the ids that transformers gives."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{path} has no tokenizer.json: add the model's own, or make one with "
                "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        config = _read(path / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # an older folder, which says in a file of its own what is special
            config |= _read(path / "special_tokens_map.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{file} is not a tokenizer this version can read: {error}") from error
        _add_tokens(backend, config)
        bos, eos = (backend.token_to_id(name) if (name := _content(config.get(key))) else None for key in _NAMED[:2])
        # tokenizer.json decides on bos and eos. Where it adds neither, the flags are heard, as up to transformers 4;
        # 5 ignores them, and so leaves out a bos that some models were trained with.
        if backend.num_special_tokens_to_add(is_pair=False) == 0:
            surround(
                backend, bos if config.get("add_bos_token") else None, eos if config.get("add_eos_token") else None
            )
        return cls(
            backend,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token=_content(config.get("pad_token")),
            chat_template=_chat_template(path, config),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build the tokenizer that a GGUF file carries in its metadata."""
        vocabulary = gguf_tokenizer.read(metadata)
        bos, eos = vocabulary.bos_token_id, vocabulary.eos_token_id
        surround(vocabulary.backend, bos if vocabulary.add_bos else None, eos if vocabulary.add_eos else None)
        pad = metadata.get("tokenizer.ggml.padding_token_id")
        return cls(
            vocabulary.backend,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token=None if pad is None else vocabulary.backend.id_to_token(int(pad)),
            chat_template=metadata.get("tokenizer.chat_template"),
        )

    @property
    def bos_token(self) -> str | None:
        """The text of the token that begins a sequence."""
        return None if self.bos_token_id is None else self.backend.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The text of the token that ends a sequence."""
        return None if self.eos_token_id is None else self.backend.id_to_token(self.eos_token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; special tokens written in it are recognised, and bos and eos added if the model has so."""
        _require_unicode(text)
        # A batch of one would start the library's threads, which then complain about every fork of this process.
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        for text in texts:
            _require_unicode(text)
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids, with no tidying of spaces; ids outside the vocabulary stand for nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def spell_words(self, words: Sequence[str]) -> list[list[int]]:
        """Words in token ids, at the start of a text and after a space; each spelling once."""
        spelled = (self.encode(lead + word, add_special_tokens=False) for word in words for lead in ("", " "))
        return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in spelled if ids)]

    @cached_property
    def longest_token(self) -> int:
        """The most bytes of UTF-8 that one token stands for: a text of N bytes has at least N / longest_token tokens.

        A normalizer that deletes or composes characters makes a text shorter before it is cut; a text would have to be
        almost nothing but those to have fewer tokens than this says.
        """
        return max((len(self.pieces.spell(token)) for token in self.backend.get_vocab()), default=1) or 1

    def token_bytes(self, id: int) -> bytes:
        """The bytes one token adds to a text; they need not be whole characters."""
        if (known := self._bytes.get(id)) is None:
            token = self.backend.id_to_token(id)
            known = self._bytes[id] = b"" if token is None else self.pieces.spell(token)
        return known

    def token_text(self, id: int) -> str:
        """One token as text, with U+FFFD where its bytes are not a whole character."""
        return self.token_bytes(id).decode(errors="replace")


def surround(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """Have every encoded text begin and end with these tokens."""
    names = [None if id is None else backend.id_to_token(id) for id in (bos, eos)]
    before, after = ([name] if name is not None else [] for name in names)
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[(name, backend.token_to_id(name)) for name in {*before, *after}],
    )


def _require_unicode(text: str) -> None:
    # JSON can carry half of a surrogate pair (a lone \ud83d), which is no character and has no bytes.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate {text[error.start]!r} at character {error.start}: send valid Unicode"
        ) from error


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__} where a JSON object is expected")
    return content


def _content(token: Any) -> str | None:
    """Special tokens are written as a string or as an object with its flags."""
    return token.get("content") if isinstance(token, dict) else token


def _added(token: Any, special: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=special, normalized=False)
    flags = {key: bool(token[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in token}
    return AddedToken(token["content"], special=special or bool(token.get("special")), **flags)


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens that only the config files name; those of tokenizer.json keep their ids and flags."""
    by_id = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    tokens = [_added(token, special=False) for _, token in by_id]
    extra = config.get("extra_special_tokens") or []
    extra = [*(extra.values() if isinstance(extra, dict) else extra), *(config.get("additional_special_tokens") or [])]
    tokens += [_added(token, special=True) for token in [*map(config.get, _NAMED), *extra] if token]
    present = backend.get_added_tokens_decoder().values()
    plain, special = {token.content for token in present}, {token.content for token in present if token.special}
    for token in tokens:  # the few that remain, one by one, so that new ids follow this order, special or not
        if token.content not in (special if token.special else plain):
            backend.add_tokens([token])


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    jinja = path / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    template = _read(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
