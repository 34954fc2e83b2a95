"""From a request's body to what routing needs: the text of its prompt in blocks, its model and its session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from chairlift.routing.policies import Ask
from chairlift.routing.prefixes import CHARACTERS_A_BLOCK, TOKENS_A_BLOCK, chain_of_text

# The fields of all APIs that make up the prompt, in the order in which a chat template writes them.
_PROMPT = ("tools", "system", "instructions", "messages", "prompt", "input")
_CHARACTERS_A_TOKEN = CHARACTERS_A_BLOCK // TOKENS_A_BLOCK

_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Read:
    """What a body says about its route."""

    ask: Ask
    model: str = ""
    streams: bool = False


def read_ask(raw: bytes, tenant: str, session: str | None) -> Read:
    """Read a body. One that is not JSON has no prefix: the server that gets it refuses it."""
    try:
        body = _decode(raw) if raw else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        body = {}
    if not isinstance(body, dict):
        body = {}
    parts = [msgspec.json.encode(body[name]).decode() for name in _PROMPT if body.get(name)]
    # A conversation's next turn begins with the same text, but for the brackets that end its list.
    text = "".join(part.rstrip("]}") for part in parts)
    salt = f"{tenant}/{_text(body, 'model')}/{_text(body, 'cache_salt')}"
    chosen = session or _text(body, "prompt_cache_key") or _text(body, "user")
    ask = Ask(len(text) // _CHARACTERS_A_TOKEN, chain_of_text(text, salt), chosen[:256])
    return Read(ask, _text(body, "model")[:256], body.get("stream") is True)


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    return value if isinstance(value, str) else ""
