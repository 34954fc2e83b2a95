"""The bytes of each token: the part of a tokenizer's decoder that incremental decoding needs."""

import codecs
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import decoders

from chairlift.core.errors import ModelError

_SPACE = "▁"  # a space in SentencePiece
_EACH_BYTE = "chairlift.replace-each-byte"


def _byte_of_letter() -> dict[str, int]:
    """Return the byte of each letter in byte-level vocabularies: a printable byte is itself, others start at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_of_letter()
_BYTE_TOKENS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


# Decoders differ in the number of U+FFFD for a broken character: byte-level decoders write one, byte-fallback decoders
# one for each of its bytes.
codecs.register_error(_EACH_BYTE, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The rules that give a vocabulary entry its bytes, so that a text is the concatenation of its tokens' bytes."""

    spell: Callable[[str], bytes]  # the bytes of a token inside a text
    open: Callable[
        [bytes], bytes
    ]  # the first token's bytes at the start of a text, without a leading space that encoding added
    errors: str  # codec error handler for broken UTF-8

    @classmethod
    def of(cls, decoder: decoders.Decoder | None) -> "Pieces":
        """Read the rules of a `tokenizers` decoder."""
        steps = _steps(decoder)
        if "ByteLevel" in steps:
            return cls(_spell_byte_level, _keep, "replace")
        if "ByteFallback" in steps or "Metaspace" in steps:
            errors = _EACH_BYTE if "ByteFallback" in steps else "replace"
            return cls(_spell_sentencepiece, _opening(steps), errors)
        raise ModelError(
            f"the tokenizer's decoder is {' + '.join(steps) or 'missing'}, which cannot be read token by token: "
            "use a model with a byte-level or SentencePiece tokenizer"
        )


def _steps(decoder: decoders.Decoder | None) -> dict[str, Mapping[str, Any]]:
    if decoder is None:
        return {}
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return {step["type"]: step for step in state.get("decoders", [state])}


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[letter] for letter in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def _spell_sentencepiece(token: str) -> bytes:
    return _BYTE_TOKENS.get(token) or token.replace(_SPACE, " ").encode()


def _opening(steps: Mapping[str, Mapping[str, Any]]) -> Callable[[bytes], bytes]:
    # SentencePiece adds a space before a text when it encodes, and removes it when it decodes.
    if steps.get("Strip", {}).get("start", 0):
        return _drop_one_space
    if steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never":
        return _drop_spaces
    return _keep


def _keep(first: bytes) -> bytes:
    return first


def _drop_one_space(first: bytes) -> bytes:
    return first.removeprefix(b" ")


def _drop_spaces(first: bytes) -> bytes:
    return first.replace(b" ", b"")
