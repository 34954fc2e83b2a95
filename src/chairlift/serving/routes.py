"""The routes: what each answers, and who may ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from starlette.responses import Response

from chairlift import __version__
from chairlift.core.errors import RequestError
from chairlift.openai.options import NAME
from chairlift.openai.params import get
from chairlift.serving.asking import INLINE, check_sizes
from chairlift.serving.engine_client import EngineClient
from chairlift.serving.failures import Failure, invalid, unavailable
from chairlift.serving.messages import Explained
from chairlift.serving.openapi import describe
from chairlift.serving.service import Call, check_model, json_response
from chairlift.serving.text_jobs import Chat, Detokenize, Encode, Room, Tokenize


class Access(Enum):
    """Who may use a route once keys are configured."""

    OPEN = "open"
    USER = "user"
    ADMIN = "admin"


Endpoint = Callable[[Call], Awaitable[Response]]
T = TypeVar("T")
_QUESTIONS = 8  # of one HTTP process at once: the engine explains one request between two steps


@dataclass(frozen=True, slots=True)
class Route:
    """A path with a method, and its endpoint. There is no default access: each says its own."""

    method: str
    path: str
    access: Access
    endpoint: Endpoint


async def chat_completions(call: Call) -> Response:
    """A conversation's next message."""
    return await call.generate(chat=True)


async def completions(call: Call) -> Response:
    """A text's continuation."""
    return await call.generate(chat=False)


async def models(call: Call) -> Response:
    """The one model."""
    return json_response({"object": "list", "data": [_model(call)]})


async def model(call: Call) -> Response:
    """The model by its name."""
    check_model(call.http.path_params["name"], call.service.model)
    return json_response(_model(call))


def _model(call: Call) -> dict[str, Any]:
    hello = call.service.client.hello
    return {
        "id": call.service.model,
        "object": "model",
        "created": call.service.started,
        "owned_by": "chairlift",
        "max_model_len": None if hello is None else hello.max_length,
    }


async def request(call: Call) -> Response:
    """Where a request is, and why it waits: a tenant may ask about its own, an administrator about all."""
    name = call.http.path_params["id"]
    tenant = None if call.tenant is None or call.tenant.is_admin else call.tenant.name
    # The id of a reply, which is all that some clients show, is the request's behind what kind of reply it is.
    for wanted in dict.fromkeys((name, name.removeprefix("chatcmpl-"), name.removeprefix("cmpl-"))):
        found = await _explain(call, wanted, tenant) if NAME.fullmatch(wanted) else None
        if found is not None and found.answers:
            return json_response(
                {"id": wanted, "object": "request", "unfinished": found.unfinished, "answers": found.answers}
            )
    # What another tenant's is called is nobody's business: there is one answer for those and for what is not there.
    told = f"no request {name[:128]!r} of yours waits or runs here: it has ended, or never came"
    raise invalid(told, status=404, code="unknown_request")


async def _explain(call: Call, name: str, tenant: str | None) -> Explained:
    return await _ask(call, lambda client: client.explain(name, tenant))


async def _ask(call: Call, question: Callable[[EngineClient], Awaitable[T | None]]) -> T:
    """What the engine answers, in time or not at all."""
    client = call.service.client
    if client.questions >= _QUESTIONS:
        told = f"{client.questions} questions wait for the engine: ask again in a moment"
        raise Failure(told, 429, "rate_limit_error", "too_many_questions", retry_after=1.0)
    if client.trouble is None and (found := await question(client)) is not None:
        return found
    raise unavailable(client.trouble or "the engine did not say in time: it is in a long step", 2.0)


async def reset_prefix_cache(call: Call) -> Response:
    """Forget what later prompts could have shared; those under way keep what they have."""
    return json_response({"blocks": await _ask(call, EngineClient.reset_prefix_cache)})


async def embeddings(call: Call) -> Response:
    """Not with a language model that only generates."""
    raise Failure(
        f"{call.service.model} gives no embeddings: use /v1/chat/completions or /v1/completions, or serve a model "
        "that does",
        404,
        "invalid_request_error",
        "embeddings_not_supported",
    )


async def tokenize(call: Call) -> Response:
    """Text, or a conversation, to token ids."""
    body = await call.body()
    hello, reader = call.service.hello, call.service.reader
    check_model(body.get("model"), call.service.model)
    room = Room(hello.max_length)
    source: Chat | Encode
    if "messages" in body:
        check_sizes(body)
        source, size = reader.chat_job(body, room), INLINE + 1  # a chat template never runs on the event loop
    elif isinstance(prompt := body.get("prompt"), str):
        reader.require_tokenizer()
        special = bool(prompt) and get(body, "add_special_tokens", "true or false") is not False
        source, size = Encode([prompt], room, special), len(prompt)
    else:
        raise RequestError('prompt must be a string, or messages a conversation: {"prompt": "Hello"}')
    with_strings = bool(get(body, "return_token_strs", "true or false"))
    return await call.written(Tokenize(source, hello.max_length, with_strings), size)


async def detokenize(call: Call) -> Response:
    """Token ids to text."""
    body = await call.body()
    hello, reader = call.service.hello, call.service.reader
    check_model(body.get("model"), call.service.model)
    ids = get(body, "tokens", "a list of whole numbers")
    if ids is None:
        raise RequestError('tokens must be a list of token ids: {"tokens": [1, 2, 3]}')
    reader.require_tokenizer()
    for token in (min(ids), max(ids)) if ids else ():
        if not 0 <= token < hello.vocab_size:
            raise RequestError(f"tokens holds {token}, but the model's ids go from 0 to {hello.vocab_size - 1}")
    return await call.written(Detokenize(ids), 4 * len(ids))


async def tokenizer_info(call: Call) -> Response:
    """What a client needs to use the tokenizer from afar, named as in tokenizer_config.json; vLLM answers so too."""
    tokenizer = call.service.reader.require_tokenizer()
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # the class of transformers that reads any tokenizer.json
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "chat_template": tokenizer.chat_template,
            "model_max_length": call.service.hello.max_length,
            "vocab_size": tokenizer.vocab_size,
        }
    )


async def health(call: Call) -> Response:
    """Whether requests are being served, in truth: 503 when the engine is gone, stuck or not there yet."""
    trouble = call.service.client.trouble
    if trouble is not None:
        return json_response({"status": "unhealthy", "reason": trouble}, 503)
    return json_response({"status": "ok"})


async def ready(call: Call) -> Response:
    """Whether new requests are welcome: not while draining, either."""
    trouble = "the server is shutting down" if call.service.is_draining else call.service.client.trouble
    if trouble is not None:
        return json_response({"status": "not ready", "reason": trouble}, 503)
    return json_response({"status": "ready"})


async def metrics(call: Call) -> Response:
    """For Prometheus."""
    content, kind = call.service.metrics.render()
    return Response(content, media_type=kind)


async def version(call: Call) -> Response:
    """Which Chairlift this is."""
    return json_response({"version": __version__})


async def openapi(call: Call) -> Response:
    """All of this, for machines."""
    return json_response(describe(call.service.model))


ROUTES = (
    Route("POST", "/v1/chat/completions", Access.USER, chat_completions),
    Route("POST", "/v1/completions", Access.USER, completions),
    Route("GET", "/v1/models", Access.USER, models),
    Route("GET", "/v1/models/{name:path}", Access.USER, model),
    Route("GET", "/v1/requests/{id}", Access.USER, request),
    Route("POST", "/v1/embeddings", Access.USER, embeddings),
    Route("POST", "/tokenize", Access.USER, tokenize),
    Route("POST", "/detokenize", Access.USER, detokenize),
    Route("GET", "/tokenizer_info", Access.USER, tokenizer_info),
    Route("GET", "/health", Access.OPEN, health),
    Route("GET", "/ready", Access.OPEN, ready),
    Route("GET", "/version", Access.OPEN, version),
    Route("GET", "/openapi.json", Access.OPEN, openapi),
    Route("GET", "/metrics", Access.ADMIN, metrics),
    Route("POST", "/reset_prefix_cache", Access.ADMIN, reset_prefix_cache),
)
