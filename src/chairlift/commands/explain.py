"""`chairlift explain`: why a request waits, or how many tokens it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from chairlift.commands.screen import write
from chairlift.core.errors import ChairliftError

if TYPE_CHECKING:
    from chairlift.bench.http import Reply

_TIMEOUT = 30.0  # seconds; the server answers sooner, even when its engine does not


def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="The reply's X-Request-Id header, the id of its chunks, or the request_id that you sent.",
        ),
    ],
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="The API key that sent the request, or an administrator's.", show_default=False)
    ] = None,
) -> None:
    """Show why a request waits, or how many tokens it has."""
    import asyncio

    reply = asyncio.run(_ask(url, f"/v1/requests/{quote(request_id, safe='')}", api_key))
    match reply.status, reply.json():
        case 200, {"answers": [_, *_] as answers, "unfinished": int(unfinished)}:
            for line in _lines(answers, unfinished):
                write(f"{line}\n")
        case _, _:
            raise ChairliftError(str(reply))


async def _ask(url: str, path: str, api_key: str | None) -> Reply:
    import asyncio

    from chairlift.bench import http

    server = http.Server.parse(url, api_key)
    try:
        async with asyncio.timeout(_TIMEOUT):
            return await http.get(server, path)
    except (OSError, http.ReplyError) as error:
        reason = http.reason_of(error, _TIMEOUT)
        raise ChairliftError(f"no server answers at {server.url} ({reason}): start it, or give its --url") from None


def _lines(answers: list[dict[str, Any]], unfinished: int) -> Iterator[str]:
    for number, answer in enumerate(answers, 1):
        if unfinished > 1:
            yield f"Answer {number} of {unfinished} that have not ended:"
        yield from (str(sentence) for sentence in answer.get("why", ()))
