"""Fill-in-the-middle: a prompt and a suffix as code models read them, with the answer to come between the two."""

from __future__ import annotations

from chairlift.core.errors import RequestError
from chairlift.text.tokenizer import Tokenizer

# Families' tokens before the prompt, before the suffix, and before the answer.
_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral


def fill_in(prompt: str, suffix: str, tokenizer: Tokenizer) -> str:
    """Return the text to continue; the continuation belongs between the prompt and the suffix."""
    known = tokenizer.backend.token_to_id
    for before, between, middle in _MARKERS:
        if all(known(marker) is not None for marker in (before, between, middle)):
            return f"{before}{prompt}{between}{suffix}{middle}"
    if all(known(marker) is not None for marker in _SUFFIX_FIRST):
        return f"{_SUFFIX_FIRST[0]}{suffix}{_SUFFIX_FIRST[1]}{prompt}"
    raise RequestError("suffix needs a model with fill-in-the-middle tokens, and this one has none: leave it out")
