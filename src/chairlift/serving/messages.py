"""Messages between an HTTP process and the engine process: typed and bounded token ids and names, no text but a
grammar.

Each is a msgspec struct, encoded as a MessagePack array that starts with a tag. An order that does not match its type
is a bug or an attack: it never reaches the scheduler, and its sender gets an Unreadable. SamplingParams is the core's
own dataclass, so its fields are not repeated here.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from chairlift.core.constraint import Thinking
from chairlift.core.explain import MOST, Standing
from chairlift.core.params import SamplingParams

MAX_MESSAGE = 64 << 20  # bytes
PREFILLED = "prefilled"  # finish_reason of a prompt after another engine has received its blocks
REFUSED = "refused"  # finish_reason of a request that the engine rejected or could not continue: the client's error
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Key = Annotated[int, Meta(ge=0, lt=1 << 62)]
Index = Annotated[int, Meta(ge=0, lt=1 << 16)]
Name = Annotated[str, Meta(max_length=128)]  # id of a request, as its client knows it
TenantName = Annotated[str, Meta(max_length=64)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31)]
Salt = Annotated[str, Meta(max_length=64 + 1 + 256)]  # tenant name, slash, cache_salt


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Submit a request: prompt token ids, SamplingParams without text fields, and inputs of scheduling policies."""

    key: Key  # the sender's number for the request
    id: Name
    prompt: Annotated[list[Token], Meta(max_length=1 << 22)]
    params: SamplingParams  # validated while it is decoded: raises RequestError
    arrival: float = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    eos_ids: Annotated[list[Token], Meta(max_length=1 << 12)] = []
    bad_words: Annotated[list[list[Token]], Meta(max_length=1 << 12)] = []  # params.bad_words in token ids
    tenant: TenantName = ""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    priority: Priority = 0
    deadline: float | None = None  # time by which the first token is due, on the clock of `arrival`
    endpoint: Annotated[str, Meta(max_length=16)] = ""
    salt: Salt = ""  # requests with the same salt may share prefixes
    # What the answer must match, in llguidance's language: checked within limits before it is sent.
    grammar: Annotated[str, Meta(max_length=1 << 21)] = ""
    thinking: Thinking | None = None  # the answer may begin with reasoning, to which the grammar does not apply
    prediction: Annotated[list[Token], Meta(max_length=1 << 22)] = []  # tokens that the answer may repeat
    # Address of an engine that gets the prompt's KV blocks; this engine then samples no token for the client, and
    # reports only PREFILLED.
    send_to: Annotated[str, Meta(max_length=256)] = ""
    prefilled: Annotated[int, Meta(ge=0)] = 0  # prompt tokens that another engine computed and sent here


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Abort a request: its client disconnected, or it timed out."""

    key: Key


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """End one answer: its text contains a stop string."""

    key: Key
    index: Index


class Explain(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Ask for the state of a request and the reason why it waits; any HTTP process may have submitted it."""

    question: Key  # the sender's number for the question
    id: Name
    tenant: TenantName | None  # the required owner; None: any


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Empty the prefix cache."""

    question: Key


class Read(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Acknowledge the total bytes of reports read from the connected engine."""

    total: Annotated[int, Meta(ge=0)]


class Watch(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Ask for records of the steps, for so many seconds from now; a page shows them."""

    seconds: Annotated[float, Meta(gt=0, le=60)]
    is_new: bool = False  # the next record must have all that a new reader needs
    prompt_tokens: Annotated[int, Meta(ge=0, le=256)] = 0  # of each prompt, to show them


Order = Submit | Abort | Stop | Explain | ResetPrefixCache | Read | Watch


class SampledLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability, its rank, and the likeliest alternatives."""

    token: Token
    logprob: float
    rank: int
    top: msgspec.Raw  # token ids and log-probabilities, decoded only where the reply is written


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a prompt's tokens from `start` on."""

    start: int
    entries: msgspec.Raw  # each a token, its log-probability, its rank and the alternatives


class AnswerUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Update of one answer: its token of a step, its end or an error."""

    key: Key
    index: Index
    token: Token | None = None
    finish_reason: str | None = None
    started: float | None = None  # when it was admitted to the batch; with the first tokens only
    cached: int = 0  # prompt tokens found in the prefix cache; with the first tokens only
    logprobs: SampledLogprob | None = None
    prompt_logprobs: PromptScores | None = None
    error: str | None = None
    drafts: tuple[int, int] | None = None  # draft tokens checked and accepted so far, if there were any


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of the engine after a step, and its counters since it started."""

    running: int
    waiting: int
    free_blocks: int  # neither owned by a sequence nor cached
    total_blocks: int
    submitted: int
    finished: int
    aborted: int
    rejected: int
    failed: int
    preemptions: int
    step_seconds: float = 0.0  # of the last step; 0 if none ran
    step_tokens: int = 0
    blocked_by: str = ""  # why the next request is not admitted
    swapped_out: int = 0  # blocks, to host memory
    swapped_in: int = 0
    cached_blocks: int = 0  # owned by no sequence, kept by the prefix cache
    queried_tokens: int = 0  # prompt tokens looked up in the prefix cache
    cached_tokens: int = 0  # prompt tokens found in it
    evicted_blocks: int = 0
    copied_blocks: int = 0  # for a prefix hit that ends within a block
    from_host: int = 0  # cached blocks restored from host memory
    from_disk: int = 0
    sent_blocks: int = 0  # to other engines and the KV store
    received_blocks: int = 0  # from them
    checks: int = 0  # of draft tokens
    drafted: tuple[int, ...] = ()  # draft tokens checked, by position
    accepted: tuple[int, ...] = ()
    correlation: float | None = None  # of predicted and true output lengths
    policy: dict[str, float] = {}  # the scheduling policy's own numbers, by name
    service: dict[str, float] = {}  # per tenant with requests, under the fair policy


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Sent when an engine has connected: its model and limits."""

    model: str
    device: str
    dtype: str
    max_sequences: int
    step_tokens: int
    max_length: int
    vocab_size: int
    block_size: int
    kv_tokens: int
    capacity: str  # the KV cache's size in words
    eos_ids: list[Token]
    weights: str = ""  # formats and bytes of the matrices that a step reads, in words


class StepReport(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The updates of one step for one HTTP process."""

    updates: list[AnswerUpdate]
    stats: Stats | None = None


class Broken(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The reason why the engine cannot start, as one line for the user."""

    message: str


class Explained(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The reply to Explain; an empty list means that no live request matches."""

    question: Key
    answers: Annotated[list[Standing], Meta(max_length=MOST)]
    unfinished: int  # number of unfinished answers, which may exceed the list


class PrefixCacheReset(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The reply to ResetPrefixCache."""

    question: Key
    blocks: int  # number that later prompts could have shared


class Unreadable(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Error: the engine could not decode an order; no other reply to it follows."""

    key: Key  # of the request or the question
    message: str


class Watched(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """What the steps since the last one did (engine/recorder.py)."""

    record: bytes  # JSON, which is passed on as it is


Report = Hello | StepReport | Broken | Explained | PrefixCacheReset | Unreadable | Watched

encode = msgspec.msgpack.Encoder().encode
decode_top = msgspec.msgpack.Decoder(list[tuple[Token, float]]).decode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def key_of(raw: bytes) -> int | None:
    """Return the key of an order that does not match its type: the first field after the tag.

    >>> key_of(msgspec.msgpack.encode([1, 77, "no prompt"]))
    77
    """
    try:
        found = msgspec.msgpack.decode(raw)
    except msgspec.DecodeError:
        return None
    key = found[1] if isinstance(found, list) and len(found) > 1 else None
    return key if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < 1 << 62 else None
