"""The tokenizer in a GGUF file's metadata, rebuilt for the `tokenizers` library."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from chairlift.core.errors import ModelError
from chairlift.core.values import Values, one_line, show
from chairlift.text.splits import SPLITS, Split

MAX_TOKENS: Final = 1 << 20  # four times the largest known vocabulary; each token takes hundreds of bytes here

# The values of tokenizer.ggml.token_type that are read here.
_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A backend with its added tokens, and the file's bos and eos."""

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token: str | None
    add_bos: bool
    add_eos: bool


def read(metadata: Mapping[str, Any]) -> GgufVocabulary:
    """Rebuild the tokenizer from the keys under `tokenizer.ggml`."""
    prefix = "tokenizer.ggml."
    found = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    keys = Values("the GGUF file", found, prefix)
    tokens = _tokens(keys)
    types = [int(type) for type in keys.numbers("token_type")] or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types: download it again")
    backend, adds_bos, (bos, eos) = _backend(keys, tokens, types)
    backend.add_special_tokens([t for t, type in zip(tokens, types, strict=True) if type in (_CONTROL, _UNKNOWN)])
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, type in zip(tokens, types, strict=True) if type == _USER_DEFINED]
    )
    pad = _token_id(keys, "padding_token_id", len(tokens))
    return GgufVocabulary(
        backend,
        bos_token_id=_token_id(keys, "bos_token_id", len(tokens), bos),
        eos_token_id=_token_id(keys, "eos_token_id", len(tokens), eos),
        pad_token=None if pad is None else tokens[pad],
        add_bos=keys.flag("add_bos_token", adds_bos),
        add_eos=keys.flag("add_eos_token"),
    )


def _backend(
    keys: Values, tokens: Sequence[str], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool, tuple[int | None, int | None]]:
    """Return the tokenizer, and its model's defaults for add_bos and for the ids of bos and eos."""
    family = keys.text("model", "(none named)")
    try:
        if family == "gpt2":
            split = _split(keys.text("pre", "default"))
            return _byte_level(tokens, _merges(keys), split), split.adds_bos, (None, None)
        if family == "llama":
            scores = keys.numbers("scores") or [0.0] * len(tokens)
            return _sentencepiece(tokens, types, scores, keys.flag("add_space_prefix", True)), True, (1, 2)
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"the GGUF file's vocabulary is inconsistent: {one_line(error)}; download it again") from error
    raise ModelError(f"the GGUF tokenizer is of the kind {show(family)}; known are 'gpt2' and 'llama'")


def _token_id(keys: Values, key: str, size: int, default: int | None = None) -> int | None:
    """Return the id of a special token; None if the vocabulary does not have it."""
    found = keys.ids(key, size) if keys.has(key) else [] if default is None else [default]
    return found[0] if found and found[0] < size else None


def _tokens(keys: Values) -> list[str]:
    if not keys.has("tokens"):
        raise ModelError("the GGUF file carries no tokenizer (tokenizer.ggml.tokens): use one converted with it")
    if len(keys.texts("tokens")) > MAX_TOKENS:
        raise ModelError(f"the GGUF file has {len(keys.texts('tokens')):,} tokens: at most {MAX_TOKENS:,} are read")
    # Some files pad the vocabulary with empty strings, which would be equal tokens.
    tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(keys.texts("tokens"))]
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, number in Counter(tokens).items() if number > 1)
        raise ModelError(f"the GGUF file's vocabulary has the token {show(twice)} twice: convert the model again")
    return tokens


def _split(name: str) -> Split:
    split = SPLITS.get(name or "default")
    if split is None:
        raise ModelError(
            f"the GGUF pre-tokenizer {show(name)} is not known; known are {', '.join(sorted(SPLITS))}: "
            "use the model's safetensors folder, with a tokenizer.json that defines the split"
        )
    return split


def _merges(keys: Values) -> list[tuple[str, str]]:
    if not keys.has("merges"):
        raise ModelError("the GGUF file has a BPE vocabulary without merges (tokenizer.ggml.merges): convert it again")
    pairs = (merge.partition(" ") for merge in keys.texts("merges"))
    return [(left, right) for left, _, right in pairs]


def _byte_level(tokens: Sequence[str], merges: list[tuple[str, str]], split: Split) -> tokenizers.Tokenizer:
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.whole_words_first))
    if split.composes:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], add_space_prefix: bool
) -> tokenizers.Tokenizer:
    vocabulary = {token: id for id, token in enumerate(tokens)}
    unknown = next((token for token, type in zip(tokens, types, strict=True) if type == _UNKNOWN), None)
    words = {token: id for token, id in vocabulary.items() if types[id] == _NORMAL}
    model = models.BPE(
        vocabulary, _merges_by_score(words, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    prefix = [normalizers.Prepend("▁")] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges_by_score(words: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all cuts of a word into two tokens, best score of the word first: SentencePiece merges in that order."""
    ranked = [
        (-scores[id], left_id, right_id, word[:cut], word[cut:])
        for word, id in words.items()
        for cut in range(1, len(word))
        if (left_id := words.get(word[:cut])) is not None and (right_id := words.get(word[cut:])) is not None
    ]
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
