"""Query: one request of traffic, the same record for workloads, arrivals, mixes and recorded traces."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

Ids = list[int]
Encode = Callable[[str], Ids]
VOCABULARY = 10000  # bound of drawn token ids where the vocabulary is unknown; real models have more

# Each of these is one token in nearly every vocabulary.
_COMMON = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an had they "
    "you were their one all we can her has there been if more when will would who so no out up into them then she "
    "some what could time two may other its only my now over new these your any me first how people also made way"
)
WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True)
class Query:
    """A request's prompt, answer length, send time, tenant and scheduling fields."""

    prompt: Ids | str | int  # token ids, a text, or only the number of tokens
    output_tokens: int
    at: float = 0.0  # send time, in seconds from the start
    after_tokens: int = (
        0  # hold until all others together have this many tokens: a time that does not depend on the machine
    )
    tenant: str = ""
    kind: str = ""  # its kind within a mix, for the report; the scheduler does not see it
    endpoint: str = ""
    priority: int = 0
    deadline: float | None = None  # seconds from `at` until the first token is due
    blocks: Sequence[int] = ()  # ids of the prompt's blocks, in traces without tokens
    block_tokens: int = 512  # of each block; Mooncake's have 512

    @property
    def ids(self) -> Ids:
        """The prompt's token ids; `encoded` or `drawn` must have made them."""
        assert isinstance(self.prompt, list), "the prompt has no token ids: call `encoded` or `drawn` first"
        return self.prompt

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens; 0 for a text, which is not encoded yet."""
        return self.prompt if isinstance(self.prompt, int) else 0 if isinstance(self.prompt, str) else len(self.prompt)

    def drawn(self, r: random.Random, vocab_size: int = VOCABULARY) -> Query:
        """Return the request with random tokens if its prompt is a length; equal blocks get equal tokens."""
        if not isinstance(self.prompt, int):
            return self
        ids: Ids = []
        for block in self.blocks:
            ids += random.Random(block).choices(range(vocab_size), k=self.block_tokens)
        ids = ids[: self.prompt]
        return replace(self, prompt=ids + r.choices(range(vocab_size), k=self.prompt - len(ids)))

    def within(self, vocab_size: int) -> Query:
        """Return the request with its token ids modulo the vocabulary size."""
        if not isinstance(self.prompt, list):
            return self
        return replace(self, prompt=[token % vocab_size for token in self.prompt])

    def text(self, r: random.Random) -> str:
        """Return the prompt as text, with one common word per token."""
        if isinstance(self.prompt, str):
            return self.prompt
        return " ".join(WORDS[token % len(WORDS)] for token in self.drawn(r).ids)


def encoded(queries: Iterable[Query], encode: Encode, vocab_size: int) -> list[Query]:
    """Return the requests with prompts encoded, and token ids within the vocabulary."""
    return [
        (replace(query, prompt=encode(query.prompt)) if isinstance(query.prompt, str) else query).within(vocab_size)
        for query in queries
    ]
