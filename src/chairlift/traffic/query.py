"""Query: one request of traffic, the same record for workloads, arrivals, mixes and recorded traces."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

Ids = list[int]
Encode = Callable[[str], Ids]
VOCABULARY = 10000  # tokens are drawn below this where no vocabulary is known; real models have more

# Nearly every vocabulary has each of these as one token.
_COMMON = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an had they "
    "you were their one all we can her has there been if more when will would who so no out up into them then she "
    "some what could time two may other its only my now over new these your any me first how people also made way"
)
WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True)
class Query:
    """What a request asks, how long its answer is, when it is sent, and on whose behalf."""

    prompt: Ids | str | int  # token ids, a text, or only the number of tokens
    output_tokens: int
    at: float = 0.0  # seconds from the start
    after: int = 0  # and not before all others together have so many tokens: a moment that is the same on any machine
    tenant: str = ""
    kind: str = ""  # which of a mix's kinds of requests it is: only the experiment knows
    endpoint: str = ""
    priority: int = 0
    deadline: float | None = None  # seconds from `at` to its first token
    blocks: Sequence[int] = ()  # ids of the prompt's blocks, where a trace has them instead of tokens

    @property
    def ids(self) -> Ids:
        """The prompt, where it is known to be in tokens."""
        assert isinstance(self.prompt, list), "`encoded` and `drawn` make tokens of texts and lengths"
        return self.prompt

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; a text has none until a tokenizer has counted them."""
        return self.prompt if isinstance(self.prompt, int) else 0 if isinstance(self.prompt, str) else len(self.prompt)

    def drawn(self, r: random.Random, vocab_size: int = VOCABULARY) -> Query:
        """The same with random tokens in the place of a length."""
        if not isinstance(self.prompt, int):
            return self
        return replace(self, prompt=r.choices(range(vocab_size), k=self.prompt))

    def within(self, vocab_size: int) -> Query:
        """The same for a vocabulary that may be smaller."""
        if not isinstance(self.prompt, list):
            return self
        return replace(self, prompt=[token % vocab_size for token in self.prompt])

    def text(self, r: random.Random) -> str:
        """The prompt for a server that reads text: about as many tokens as are wanted."""
        if isinstance(self.prompt, str):
            return self.prompt
        return " ".join(WORDS[token % len(WORDS)] for token in self.drawn(r).ids)


def encoded(queries: Iterable[Query], encode: Encode, vocab_size: int) -> list[Query]:
    """The same with texts in tokens, and all of them within a vocabulary."""
    return [
        (replace(query, prompt=encode(query.prompt)) if isinstance(query.prompt, str) else query).within(vocab_size)
        for query in queries
    ]
