"""The tokenizer that a GGUF file carries in its metadata, rebuilt for the `tokenizers` library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from chairlift.core.errors import ModelError
from chairlift.text.splits import SPLITS, Split

# The values of tokenizer.ggml.token_type that matter here.
_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A backend that knows its added tokens, and what the file says of bos and eos."""

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_id: int | None
    add_bos: bool
    add_eos: bool


def read(metadata: Mapping[str, Any]) -> GgufVocabulary:
    """Rebuild the tokenizer from the keys under `tokenizer.ggml`."""
    prefix = "tokenizer.ggml."
    keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    family = keys.get("model")
    tokens = _tokens(keys)
    types = [int(type) for type in keys.get("token_type", ())] or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types: download it again")
    try:
        if family == "gpt2":
            split = _split(keys.get("pre"))
            backend, adds_bos, defaults = _byte_level(tokens, _merges(keys), split), split.adds_bos, {}
        elif family == "llama":
            scores = [float(score) for score in keys.get("scores", ())] or [0.0] * len(tokens)
            backend = _sentencepiece(tokens, types, scores, bool(keys.get("add_space_prefix", True)))
            adds_bos, defaults = True, {"bos": 1, "eos": 2}
        else:
            raise ModelError(f"the GGUF tokenizer is of the kind {family!r}; known are 'gpt2' and 'llama'")
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"the GGUF file's vocabulary does not fit together: {error}; download it again") from error
    backend.add_special_tokens([t for t, type in zip(tokens, types, strict=True) if type in (_CONTROL, _UNKNOWN)])
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, type in zip(tokens, types, strict=True) if type == _USER_DEFINED]
    )
    return GgufVocabulary(
        backend,
        bos_token_id=keys.get("bos_token_id", defaults.get("bos")),
        eos_token_id=keys.get("eos_token_id", defaults.get("eos")),
        add_bos=bool(keys.get("add_bos_token", adds_bos)),
        add_eos=bool(keys.get("add_eos_token", False)),
    )


def _tokens(keys: Mapping[str, Any]) -> list[str]:
    if "tokens" not in keys:
        raise ModelError("the GGUF file carries no tokenizer (tokenizer.ggml.tokens): use one converted with it")
    # Padding of a vocabulary is at times written as empty strings, which could not be told apart.
    tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(keys["tokens"])]
    if len(set(tokens)) != len(tokens):
        twice = next(token for id, token in enumerate(tokens) if tokens.index(token) != id)
        raise ModelError(f"the GGUF file's vocabulary has the token {twice!r} twice: convert the model again")
    return tokens


def _split(name: str | None) -> Split:
    split = SPLITS.get(name or "default")
    if split is None:
        raise ModelError(
            f"the GGUF pre-tokenizer {name!r} is not known; known are {', '.join(sorted(SPLITS))}: "
            "use the model's safetensors folder, whose tokenizer.json says how to split"
        )
    return split


def _merges(keys: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "merges" not in keys:
        raise ModelError("the GGUF file has a BPE vocabulary without merges (tokenizer.ggml.merges): convert it again")
    pairs = (merge.partition(" ") for merge in keys["merges"])
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
    """SentencePiece joins the pair whose whole scores best; each way to cut a word in two is such a pair."""
    ranked = [
        (-scores[id], left_id, right_id, word[:cut], word[cut:])
        for word, id in words.items()
        for cut in range(1, len(word))
        if (left_id := words.get(word[:cut])) is not None and (right_id := words.get(word[cut:])) is not None
    ]
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
