"""Prompts that a router in front of several servers has computed by one of them, for another one that decodes.

The router sends such a request with the address of the server that will decode it. It proves with the cluster's key
that it may: the address comes from a header, which any client can write.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Mapping

from chairlift.core.params import SamplingParams
from chairlift.serving.engine_client import EngineClient
from chairlift.serving.failures import Failure
from chairlift.serving.fleet import Fleet
from chairlift.serving.generation import CallFields, EncodedPrompt
from chairlift.serving.messages import PREFILLED, AnswerUpdate, Submit

SEND_TO, PROOF = "x-chairlift-send-to", "x-chairlift-proof"


def proof_of(key: bytes, address: str) -> str:
    """Return the proof that the owner of the key wants prompts sent to an address."""
    return hmac.digest(key, b"send to " + address.encode(), "sha256").hex()


def target_of(headers: Mapping[str, str], key: bytes | None) -> str | None:
    """Return where a request's prompt is to be sent; None if it is an ordinary request."""
    address = headers.get(SEND_TO)
    if address is None:
        return None
    given = headers.get(PROOF, "")
    if key is None or not hmac.compare_digest(proof_of(key, address).encode(), given.encode()):
        raise Failure(
            f"{SEND_TO} needs a proof of the cluster's key: start server and router with the same --cluster-key",
            403,
            "permission_error",
            "wrong_cluster_key",
        )
    return address


class Sent:
    """Waits for the end of a prompt that an engine computes and sends."""

    def __init__(self) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def take(self, update: AnswerUpdate) -> None:
        """Handle the one update of a prompt."""
        self._set(update.finish_reason == PREFILLED)

    def lose(self, message: str) -> None:
        """Handle the loss of the engine."""
        self._set(False)

    def fail(self, message: str) -> None:
        """Handle an order that could not be decoded."""
        self._set(False)

    def _set(self, is_sent: bool) -> None:
        if not self.done.done():
            self.done.set_result(is_sent)


async def send_prompt(fleet: Fleet, encoded: EncodedPrompt, call: CallFields, address: str) -> bool:
    """Compute a prompt and send its blocks to an address; whether all of it was computed."""
    order = Submit(
        fleet.new_key(),
        call.id,
        encoded.prompt,
        SamplingParams(),
        arrival=time.monotonic(),
        tenant=call.tenant,
        weight=call.weight,
        priority=call.priority,
        endpoint=call.endpoint,
        salt=call.salt,
    )
    found = fleet.place_prompt(order, address, sent := Sent())
    if found is None:
        return False
    client, route = found
    is_sent = False
    try:
        is_sent = await sent.done
    finally:
        end(client, order.key, has_ended=sent.done.done())
        route.end("finished" if is_sent else "aborted")
    return is_sent


def end(client: EngineClient, key: int, *, has_ended: bool) -> None:
    """Forget a prompt, or abort it if it has not ended."""
    (client.forget if has_ended else client.abort)(key)
