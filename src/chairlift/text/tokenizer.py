"""Text to token ids and back, with the `tokenizers` library."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from chairlift.core.errors import ModelError, RequestError
from chairlift.core.values import Values, one_line
from chairlift.json_file import read_json
from chairlift.text import gguf_tokenizer
from chairlift.text.pieces import Pieces

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer: ids of a text, text of ids, and the model's chat template.

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
        self.pad_token = pad_token  # not used here; clients may ask a server for it
        self.chat_template = chat_template
        self.special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        """Read tokenizer.json and the config files beside it; the ids equal those of transformers."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{path} has no tokenizer.json: add the model's own, or make one with "
                "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        found = _read(path / "tokenizer_config.json")
        if "added_tokens_decoder" not in found:  # an older folder, with special tokens in their own file
            found |= _read(path / "special_tokens_map.json")
        config = Values(path / "tokenizer_config.json", found)
        backend = _read_backend(file)
        named = {key: _added(config, key, found[key]) for key in _NAMED if config.has(key) and found[key] != ""}
        _add_tokens(backend, [*_listed_tokens(config), *named.values(), *_extra_tokens(config, found)])
        ids = {key: backend.token_to_id(token.content) for key, token in named.items()}
        bos, eos = ids.get("bos_token"), ids.get("eos_token")
        # tokenizer.json decides on bos and eos. If it adds neither, the flags apply, as up to transformers 4; version 5
        # ignores them, and so omits a bos that some models were trained with.
        adds_bos, adds_eos = config.flag("add_bos_token"), config.flag("add_eos_token")
        if backend.num_special_tokens_to_add(is_pair=False) == 0:
            surround(backend, bos if adds_bos else None, eos if adds_eos else None)
        return cls(
            backend,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token=named["pad_token"].content if "pad_token" in named else None,
            chat_template=_chat_template(path, config, found),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build the tokenizer in a GGUF file's metadata."""
        vocabulary = gguf_tokenizer.read(metadata)
        values = Values("the GGUF file", metadata)
        bos, eos = vocabulary.bos_token_id, vocabulary.eos_token_id
        surround(vocabulary.backend, bos if vocabulary.add_bos else None, eos if vocabulary.add_eos else None)
        template = "tokenizer.chat_template"
        return cls(
            vocabulary.backend,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token=vocabulary.pad_token,
            chat_template=values.text(template) if values.has(template) else None,
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
        """Return the ids of a text; its special tokens are recognised, and bos and eos added if the model uses them."""
        _require_unicode(text)
        # A batch of one would start the library's threads, which log a warning for every fork of this process.
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of many texts, computed on all cores."""
        for text in texts:
            _require_unicode(text)
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the ids, without clean-up of spaces; ids outside the vocabulary are skipped."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def spell_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of words, at the start of a text and after a space, without duplicates."""
        spelled = (self.encode(lead + word, add_special_tokens=False) for word in words for lead in ("", " "))
        return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in spelled if ids)]

    @cached_property
    def longest_token(self) -> int:
        """The most bytes of UTF-8 in one token: a text of N bytes has at least N / longest_token tokens.

        A normalizer that deletes or composes characters shortens a text first; only a text of almost only such
        characters can have fewer tokens.
        """
        return max((len(self.pieces.spell(token)) for token in self.backend.get_vocab()), default=1) or 1

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that one token adds to a text; they need not be whole characters."""
        if (known := self._bytes.get(id)) is None:
            token = self.backend.id_to_token(id)
            known = self._bytes[id] = b"" if token is None else self.pieces.spell(token)
        return known

    def token_text(self, id: int) -> str:
        """Return one token as text, with U+FFFD for bytes that are not a whole character."""
        return self.token_bytes(id).decode(errors="replace")


def surround(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """Add these tokens before and after every encoded text."""
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
    return read_json(file) if file.is_file() else {}


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{file} is not a tokenizer this version can read: {one_line(error)}") from error


def _added(config: Values, key: str, token: Any, special: bool = True) -> AddedToken:
    """Read a token from a config file: a string, or an object with flags."""
    if isinstance(token, str):
        token = {"content": token, "normalized": False}
    if not isinstance(token, dict):
        raise config.wrong(key, "use strings or objects with a content for tokens")
    fields = Values(config.file, token, f"the token in {key}: ")
    flags = {name: fields.flag(name) for name in ("single_word", "lstrip", "rstrip", "normalized") if fields.has(name)}
    return AddedToken(fields.text("content"), special=special or fields.flag("special"), **flags)


def _listed_tokens(config: Values) -> list[AddedToken]:
    """Return the tokens of added_tokens_decoder, ordered by id."""
    key = "added_tokens_decoder"
    listed = config.part(key).items()
    if not all(id.isascii() and id.isdigit() and len(id) < 12 for id in listed):
        raise config.wrong(key, "use token ids as keys")
    return [_added(config, key, listed[id], special=False) for id in sorted(listed, key=int)]


def _extra_tokens(config: Values, found: Mapping[str, Any]) -> list[AddedToken]:
    """Return the special tokens without a key of their own."""
    tokens: list[AddedToken] = []
    for key in ("extra_special_tokens", "additional_special_tokens"):
        listed = found.get(key) or []
        listed = list(listed.values()) if isinstance(listed, dict) else listed
        if not isinstance(listed, list):
            raise config.wrong(key, "use a list of tokens")
        tokens += [_added(config, key, token) for token in listed if token]
    return tokens


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add the tokens that only the config files have; tokens of tokenizer.json keep their ids and flags."""
    present = backend.get_added_tokens_decoder().values()
    plain, special = {token.content for token in present}, {token.content for token in present if token.special}
    for token in tokens:  # one by one, so that new ids follow this order, special or not
        if token.content not in (special if token.special else plain):
            backend.add_tokens([token])


def _chat_template(path: Path, config: Values, found: Mapping[str, Any]) -> str | None:
    jinja = path / "chat_template.jinja"
    if jinja.is_file():
        return _read_text(jinja)
    file = path / "chat_template.json"
    own = Values(file, _read(file))
    if own.has("chat_template"):
        return own.text("chat_template")
    template = found.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [Values(config.file, each, "chat_template: ") for each in template if isinstance(each, dict)]
        default = next((each for each in named if each.text("name") == "default"), None)
        return None if default is None else default.text("template")
    return config.text("chat_template") if config.has("chat_template") else None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read ({error}): fetch it again") from error
