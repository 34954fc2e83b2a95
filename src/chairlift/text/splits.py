"""The patterns by which byte-level BPE models cut a text into words before merging, by pre-tokenizer name in GGUF.

The names are those of llama.cpp; the patterns are facts about each model's own tokenizer. llama.cpp does not normalise
Unicode; where the model's own tokenizer composes characters first (NFC), so do we.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ONE_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"


def _words(digits: str) -> str:
    """Return the pattern of words with one leading mark, digits in groups, and punctuation with its line ends."""
    return rf"{_ENGLISH}|{_LEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"


def _cased_words(digits: str, ending: str = "") -> str:
    """Return the pattern of words that also break between a lower-case and an upper-case letter."""
    words = f"{_LEAD}{_UPPER}*{_LOWER}+{ending}|{_LEAD}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


@dataclass(frozen=True, slots=True)
class Split:
    """The patterns to cut with, in order, and the conventions of the models that use them."""

    patterns: tuple[str, ...]
    composes: bool = False  # to NFC, before anything else
    whole_words_first: bool = False  # a word that is a token is that token, whatever the merges
    adds_bos: bool = False  # default for files without add_bos_token


_GPT2_SPLIT = Split((_GPT2,))
_DIGIT_SPLIT = Split((_ONE_DIGIT, _GPT2))
_CL100K = Split((_words(_THREE_DIGITS),))
_LLAMA3 = Split((_words(_THREE_DIGITS),), whole_words_first=True, adds_bos=True)
_ONE_DIGIT_WORDS = Split((_words(_ONE_DIGIT),))
_O200K = Split((_cased_words(_THREE_DIGITS, f"{_ENGLISH}?"),))
_DEEPSEEK3 = Split(
    (
        _THREE_DIGITS,
        "[\u4e00-\u9fa5\u3040-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
    )
)

SPLITS: Mapping[str, Split] = {
    "gpt-2": _GPT2_SPLIT,
    "phi-2": _GPT2_SPLIT,
    "exaone4": _GPT2_SPLIT,
    "olmo": Split((_GPT2,), composes=True),
    "mpt": Split((_GPT2,), composes=True),
    "smollm": _DIGIT_SPLIT,
    "starcoder": _DIGIT_SPLIT,
    "refact": _DIGIT_SPLIT,
    "codeshell": _DIGIT_SPLIT,
    "command-r": Split((_ONE_DIGIT, _GPT2), composes=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "glm4": _CL100K,
    "chatglm-bpe": _CL100K,
    "qwen2": Split((_words(_ONE_DIGIT),), composes=True),
    "deepseek-r1-qwen": _ONE_DIGIT_WORDS,
    "stablelm2": _ONE_DIGIT_WORDS,
    "hunyuan": _ONE_DIGIT_WORDS,
    "megrez": _ONE_DIGIT_WORDS,
    "tekken": Split((_cased_words(_ONE_DIGIT),), whole_words_first=True, adds_bos=True),
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    # llama.cpp's patterns for files that name no pre-tokenizer.
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
