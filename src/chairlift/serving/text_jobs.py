"""Jobs on text of any length, which run in this process or in a text process.

Each job is a msgspec struct with all inputs except the tokenizer. The result is token ids (Encoded), or JSON bytes that
are sent to the client unchanged.
"""

from __future__ import annotations

from typing import Any

import msgspec

from chairlift.core.errors import RequestError
from chairlift.core.structured import Structured
from chairlift.openai.conversation import read_messages
from chairlift.serving.reply_jobs import Reply
from chairlift.text.grammar import grammars_for
from chairlift.text.message import is_closed
from chairlift.text.parsers.reasoning import ReasoningMarkers, opens_reasoning
from chairlift.text.template import render
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tool_prompt import show_calls, show_tools


class Room(msgspec.Struct, frozen=True, array_like=True):
    """Bounds on a prompt's tokens: a longer prompt is rejected, unless only its last tokens are kept."""

    most: int  # tokens of a prompt
    keep: int | None = None  # number of last tokens to keep; None: reject a longer prompt


class Encode(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Convert texts and bad words to token ids."""

    texts: list[str]
    room: Room
    special: bool = True  # add the special tokens that the model expects around a text
    words: list[str] = []


class Chat(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Convert a conversation to token ids with the model's chat template."""

    messages: Any  # as the client sent them
    options: dict[str, Any]
    room: Room
    words: list[str] = []
    tools: list[dict[str, Any]] = []
    adds_tools: bool = False  # the template does not write tools: add them to the system message
    reasoning: ReasoningMarkers | None = None
    prediction: str = ""  # text that the answer may repeat


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Write the reply of /tokenize."""

    source: Encode | Chat
    max_length: int
    with_strings: bool = False


class Detokenize(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Write the reply of /detokenize."""

    ids: list[int]


class CheckGrammar(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Check what an answer must match; the result is the grammar."""

    structured: Structured


Job = Encode | Chat | Tokenize | Detokenize | Reply | CheckGrammar


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a text."""

    count: int
    ids: list[int]  # all, or only the last if room.keep is set; empty if they exceed the context
    is_estimate: bool = False  # count is a lower bound: the text was too large to tokenize


class Encoded(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """The result of Encode and Chat."""

    prompts: list[Prompt]
    words: list[list[int]]  # bad words in token ids
    is_open: bool = False  # a chat's prompt ends inside the reasoning
    is_closed: bool = False  # a chat's prompt ends behind the reasoning
    prediction: list[int] = []  # a chat's prediction of its answer


def perform(job: Job, tokenizer: Tokenizer | None) -> Encoded | bytes:
    """Run a job; a RequestError is an error of the client."""
    if isinstance(job, Reply):
        return job.write(tokenizer)
    assert tokenizer is not None, "Reader rejects text without a tokenizer"
    match job:
        case Tokenize():
            return _tokenize(job, tokenizer)
        case Detokenize():
            return msgspec.json.encode({"prompt": tokenizer.decode(job.ids, skip_special_tokens=False)})
        case CheckGrammar():
            return grammars_for(tokenizer).check(job.structured).encode()
    return _encode(job, tokenizer)


def estimate(text: str, most: int, tokenizer: Tokenizer) -> int | None:
    """Return a lower bound of the text's tokens if it exceeds `most`, or None if the text may fit."""
    longest = tokenizer.longest_token
    if 4 * len(text) <= most * longest:  # a character has at most four bytes
        return None
    tokens = -(-len(text.encode(errors="replace")) // longest)
    return tokens if tokens > most else None


def _encode(job: Encode | Chat, tokenizer: Tokenizer) -> Encoded:
    words = tokenizer.spell_words(job.words)
    if isinstance(job, Chat):
        text = _write(job, tokenizer)
        encoded = Encoded([_prompt(text, job.room, tokenizer, special=False)], words)
        if job.prediction:
            # No more than a sequence can repeat; the rest would be of no use.
            shown = job.prediction[: job.room.most * tokenizer.longest_token]
            predicted = tokenizer.encode_batch([shown], False)[0][: job.room.most]
            encoded = msgspec.structs.replace(encoded, prediction=predicted)
        if job.reasoning is None:
            return encoded
        is_open = opens_reasoning(text, job.reasoning)
        return msgspec.structs.replace(encoded, is_open=is_open, is_closed=is_closed(text, job.reasoning))
    return Encoded([_prompt(text, job.room, tokenizer, job.special) for text in job.texts], words)


def _write(job: Chat, tokenizer: Tokenizer) -> str:
    template = tokenizer.chat_template
    assert template is not None, "Reader rejects chats without a template"
    messages = read_messages({"messages": job.messages})
    shown = show_tools(messages, job.tools) if job.adds_tools else show_calls(messages, template)
    tools = None if job.adds_tools or not job.tools else job.tools
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    return render(template, shown, bos_token=bos, eos_token=eos, tools=tools, **job.options)


def _prompt(text: str, room: Room, tokenizer: Tokenizer, special: bool) -> Prompt:
    if room.keep is None:
        if (least := estimate(text, room.most, tokenizer)) is not None:
            return Prompt(least, [], is_estimate=True)
    else:
        # Twice the text that the longest tokens could fill, so that the cut does not change the tokens kept.
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
        strings = {token: tokenizer.decode([token], skip_special_tokens=False) for token in set(ids)}
        shown["token_strs"] = [strings[token] for token in ids]
    return msgspec.json.encode(shown)
