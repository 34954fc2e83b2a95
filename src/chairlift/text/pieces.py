"""Which bytes a token stands for: the part of a tokenizer's decoder that an incremental reader needs."""

import codecs
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import decoders

from chairlift.core.errors import ModelError

_SPACE = "▁"  # how SentencePiece writes a space
_EACH_BYTE = "chairlift.replace-each-byte"


def _byte_of_letter() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one visible letter: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_of_letter()
_BYTE_TOKENS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


# The two families of decoders differ in how many U+FFFD stand for a broken character: byte-level ones write one,
# byte-fallback ones write one for each of its bytes.
codecs.register_error(_EACH_BYTE, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class Pieces:
    """How the entries of a vocabulary are spelled in bytes, so that a text is the concatenation of its tokens."""

    spell: Callable[[str], bytes]  # the bytes of a token inside a text
    open: Callable[[bytes], bytes]  # what is left of the first token's bytes, at the very start of a text
    errors: str  # the codec error handler that writes broken UTF-8 as the decoder does

    @classmethod
    def of(cls, decoder: decoders.Decoder | None) -> "Pieces":
        """Read the rules out of a `tokenizers` decoder."""
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
    # SentencePiece puts a space before a text when it encodes, and takes it away again when it decodes.
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
