"""What crosses between an HTTP process and the engine's: numbers and names, typed and bounded; no prompt, no answer.

Each is a msgspec struct, written as a MessagePack array behind a tag. An order that does not fit its type is a bug or
an attack: it never reaches the scheduler, and its sender is told so (Unreadable). SamplingParams are the core's own
dataclass, whose fields are not repeated here.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from chairlift.core.explain import MOST, Standing
from chairlift.core.params import SamplingParams

MAX_MESSAGE = 64 << 20  # bytes
REFUSED = "refused"  # how a request ends that the engine did not take: its error is its client's
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Key = Annotated[int, Meta(ge=0, lt=1 << 62)]
Index = Annotated[int, Meta(ge=0, lt=1 << 16)]
Name = Annotated[str, Meta(max_length=128)]  # of a request, as its client knows it
TenantName = Annotated[str, Meta(max_length=64)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31)]
Salt = Annotated[str, Meta(max_length=64 + 1 + 256)]  # a tenant's name and its client's cache_salt


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request: a prompt in token ids, its SamplingParams without those of the text, and what policies read."""

    key: Key  # the sender's own number for it
    id: Name
    prompt: Annotated[list[Token], Meta(max_length=1 << 22)]
    params: SamplingParams  # checks its own ranges and lengths as it is decoded, with a RequestError
    arrival: float = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    eos_ids: Annotated[list[Token], Meta(max_length=1 << 12)] = []
    bad_words: Annotated[list[list[Token]], Meta(max_length=1 << 12)] = []  # params.bad_words in token ids
    tenant: TenantName = ""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    priority: Priority = 0
    deadline: float | None = None  # of the first token, on the clock of `arrival`
    endpoint: Annotated[str, Meta(max_length=16)] = ""
    salt: Salt = ""  # requests with the same salt may share prefixes


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The client has left, or its time is over."""

    key: Key


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """One answer's text has met a stop string."""

    key: Key
    index: Index


class Explain(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Where is a request, and why does it wait? Whichever HTTP process it came through."""

    question: Key  # the sender's own number for it
    id: Name
    tenant: TenantName | None  # whose it must be; None: anybody's


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Let no later prompt share what has been computed so far."""

    question: Key


class Read(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """So many bytes of reports have been read, in all, of the engine that is connected."""

    total: Annotated[int, Meta(ge=0)]


Order = Submit | Abort | Stop | Explain | ResetPrefixCache | Read


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability, its rank, and the likeliest alternatives."""

    token: Token
    logprob: float
    rank: int
    top: msgspec.Raw  # token ids and log-probabilities, in bytes that only the writer of the reply decodes


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a prompt's tokens from `start` on."""

    start: int
    entries: msgspec.Raw  # each a token, its log-probability, its rank and the alternatives


class AnswerUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What happened to one answer in one step."""

    key: Key
    index: Index
    token: Token | None = None
    finish_reason: str | None = None
    started: float | None = None  # when it took its seat in the batch; with the first token only
    cached: int = 0  # prompt tokens that the prefix cache had then; with the first token only
    logprobs: Scored | None = None
    prompt_logprobs: PromptScores | None = None
    error: str | None = None


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """How the engine stands after a step, and how its requests have fared since it started."""

    running: int
    waiting: int
    free_blocks: int  # of no use to anybody
    total_blocks: int
    submitted: int
    finished: int
    aborted: int
    rejected: int
    failed: int
    preemptions: int
    step_seconds: float = 0.0  # of the step just done; 0 when there was none
    step_tokens: int = 0
    blocked_by: str = ""  # what keeps the next request waiting
    swapped_out: int = 0  # blocks that went to host memory
    swapped_in: int = 0
    cached_blocks: int = 0  # held by nobody, but of use to the prefix cache
    queried_tokens: int = 0  # of prompts, looked up in the prefix cache
    cached_tokens: int = 0  # of these, found there
    evicted_blocks: int = 0
    copied_blocks: int = 0  # of which only the first tokens were of use
    from_host: int = 0  # cached blocks that came back from host memory
    from_disk: int = 0
    correlation: float | None = None  # of predicted and true lengths
    service: dict[str, float] = {}  # of each tenant that has requests here, where the policy counts it


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The engine is up, and this is what it serves."""

    model: str
    device: str
    dtype: str
    max_sequences: int
    step_tokens: int
    max_length: int
    vocab_size: int
    block_size: int
    kv_tokens: int
    capacity: str  # the same in words
    eos_ids: list[Token]


class StepReport(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """One step's news for one HTTP process."""

    updates: list[AnswerUpdate]
    stats: Stats | None = None


class Broken(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The engine cannot start, and why, in one line for the user."""

    message: str


class Explained(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The answer to Explain; with no answers under way, there is no such request."""

    question: Key
    answers: Annotated[list[Standing], Meta(max_length=MOST)]
    unfinished: int  # how many there are in all


class PrefixCacheReset(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The answer to ResetPrefixCache."""

    question: Key
    blocks: int  # that could have been shared until now


class Unreadable(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The engine could not decode an order; no other reply to it follows."""

    key: Key  # of the request or the question
    message: str


Report = Hello | StepReport | Broken | Explained | PrefixCacheReset | Unreadable

encode = msgspec.msgpack.Encoder().encode
decode_top = msgspec.msgpack.Decoder(list[tuple[Token, float]]).decode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def key_of(raw: bytes) -> int | None:
    """Return the key of an order that does not fit its type: it stands first, behind the tag.

    >>> key_of(msgspec.msgpack.encode([1, 77, "no prompt"]))
    77
    """
    try:
        found = msgspec.msgpack.decode(raw)
    except msgspec.DecodeError:
        return None
    key = found[1] if isinstance(found, list) and len(found) > 1 else None
    return key if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < 1 << 62 else None
