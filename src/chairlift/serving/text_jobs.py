"""Work on text that a client can make long: what is asked, and how it is done, in this process or in a text process.

Each job is a msgspec struct that names all it needs but the tokenizer. The result is small numbers (Encoded), or JSON
in bytes that goes to the client as it is.
"""

from __future__ import annotations

from typing import Any

import msgspec

from chairlift.core.errors import RequestError
from chairlift.openai.conversation import read_messages
from chairlift.serving.reply_jobs import Reply
from chairlift.text.template import render
from chairlift.text.tokenizer import Tokenizer


class Room(msgspec.Struct, frozen=True, array_like=True):
    """How much of a text is of use: a prompt beyond the context is refused, unless only its end is wanted."""

    most: int  # tokens of a prompt
    keep: int | None = None  # the last tokens to keep of a longer one


class Encode(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Texts to token ids, and bad words."""

    texts: list[str]
    room: Room
    special: bool = True  # add what the model wants before and after a text
    words: list[str] = []


class Chat(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A conversation to token ids, through the model's chat template."""

    messages: Any  # as the client sent them
    options: dict[str, Any]
    room: Room
    words: list[str] = []


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The reply of /tokenize."""

    source: Encode | Chat
    max_length: int
    with_strings: bool = False


class Detokenize(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The reply of /detokenize."""

    ids: list[int]


Job = Encode | Chat | Tokenize | Detokenize | Reply


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """A text's tokens."""

    count: int
    ids: list[int]  # or the last of them, if only these are wanted; none, if there are more than the context holds
    is_estimate: bool = False  # there are at least so many: the text was too large to be tokenized


class Encoded(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """What Encode and Chat give."""

    prompts: list[Prompt]
    words: list[list[int]]  # bad words in token ids


def perform(job: Job, tokenizer: Tokenizer | None) -> Encoded | bytes:
    """Do a job; a RequestError is its client's."""
    if isinstance(job, Reply):
        return job.write(tokenizer)
    assert tokenizer is not None, "text is refused before it gets here"
    match job:
        case Tokenize():
            return _tokenize(job, tokenizer)
        case Detokenize():
            return msgspec.json.encode({"prompt": tokenizer.decode(job.ids, skip_special_tokens=False)})
    return _encode(job, tokenizer)


def estimate(text: str, most: int, tokenizer: Tokenizer) -> int | None:
    """Return a number of tokens that a text has at least, if that is more than `most`; None if the text may fit."""
    longest = tokenizer.longest_token
    if 4 * len(text) <= most * longest:  # a character has at most four bytes
        return None
    tokens = -(-len(text.encode(errors="replace")) // longest)
    return tokens if tokens > most else None


def _encode(job: Encode | Chat, tokenizer: Tokenizer) -> Encoded:
    words = tokenizer.spell_words(job.words)
    if isinstance(job, Chat):
        return Encoded([_prompt(_write(job, tokenizer), job.room, tokenizer, special=False)], words)
    return Encoded([_prompt(text, job.room, tokenizer, job.special) for text in job.texts], words)


def _write(job: Chat, tokenizer: Tokenizer) -> str:
    template = tokenizer.chat_template
    assert template is not None, "a model without one is refused before"
    messages = read_messages({"messages": job.messages})
    return render(template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, **job.options)


def _prompt(text: str, room: Room, tokenizer: Tokenizer, special: bool) -> Prompt:
    if room.keep is None:
        if (least := estimate(text, room.most, tokenizer)) is not None:
            return Prompt(least, [], is_estimate=True)
    else:
        # Twice the text that the longest tokens could fill: where it is cut, the tokens kept no longer feel it.
        text = text[-2 * (room.most + 1) * tokenizer.longest_token :]
    [ids] = tokenizer.encode_batch([text], special)
    kept = ids if room.keep is None else ids[-room.keep :]
    return Prompt(len(ids), kept if len(kept) <= room.most else [])


def _tokenize(job: Tokenize, tokenizer: Tokenizer) -> bytes:
    text = job.source.texts[0] if isinstance(job.source, Encode) else _write(job.source, tokenizer)
    if (least := estimate(text, job.max_length, tokenizer)) is not None:
        raise RequestError(
            f"the text has at least {least:,} tokens and the model's context holds {job.max_length:,}: "
            "tokenize it in parts"
        )
    [ids] = tokenizer.encode_batch([text], isinstance(job.source, Encode) and job.source.special)
    shown: dict[str, Any] = {"count": len(ids), "max_model_len": job.max_length, "tokens": ids}
    if job.with_strings:
        shown["token_strs"] = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    return msgspec.json.encode(shown)
