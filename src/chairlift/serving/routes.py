"""The routes: their endpoints, and the key that each needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from starlette.responses import Response

from chairlift import __version__
from chairlift.apis.front import Front
from chairlift.apis.fronts import CHAT, COMPLETION, FRONTS, MESSAGES, RESPONSES
from chairlift.apis.messages_request import read_message
from chairlift.core.errors import ContextLengthError, RequestError
from chairlift.openai.options import NAME
from chairlift.openai.params import get
from chairlift.openai.tools import read_tools
from chairlift.serving.assets import INDEX, asset
from chairlift.serving.encoding import INLINE, check_sizes
from chairlift.serving.failures import Failure, invalid, unavailable
from chairlift.serving.fleet import Fleet
from chairlift.serving.messages import Explained
from chairlift.serving.openapi import describe
from chairlift.serving.replying import json_response
from chairlift.serving.served import ServedModel
from chairlift.serving.service import Call
from chairlift.serving.text_jobs import Chat, Detokenize, Encode, Encoded, Room, Tokenize


class Access(Enum):
    """The key that a route needs, if keys are configured: none, any, or an admin's."""

    OPEN = "open"
    USER = "user"
    ADMIN = "admin"


Endpoint = Callable[[Call], Awaitable[Response]]
T = TypeVar("T")
_QUESTIONS = 8  # pending per HTTP process: the engine answers one per step


@dataclass(frozen=True, slots=True)
class Route:
    """A method, a path and its endpoint. Access has no default: each route states its own."""

    method: str
    path: str
    access: Access
    endpoint: Endpoint
    front: Front = CHAT  # the API that determines the shape of its errors


async def chat_completions(call: Call) -> Response:
    """Generate the next message of a conversation."""
    return await call.generate(CHAT)


async def completions(call: Call) -> Response:
    """Generate the continuation of a text."""
    return await call.generate(COMPLETION)


async def responses(call: Call) -> Response:
    """Generate an answer in the shape of OpenAI's Responses API."""
    return await call.generate(RESPONSES)


async def response(call: Call) -> Response:
    """Reject: responses are not stored."""
    name = call.http.path_params["id"][:128]
    message = f"there is no response {name!r}: this server stores none; keep the reply, and send what follows as input"
    raise invalid(message, status=404, code="not_stored")


async def messages(call: Call) -> Response:
    """Generate an answer in the shape of Anthropic's Messages API."""
    return await call.generate(MESSAGES)


async def count_tokens(call: Call) -> Response:
    """Count the tokens of a conversation in the shape of Anthropic's Messages API."""
    body = await call.read_body(lambda raw: read_message(raw, is_count=True))
    hello = call.choose(body.get("model"))
    reader = call.model.reader
    check_sizes(body)
    job = reader.chat_job(body, Room(hello.max_length), use=read_tools(body))
    encoded = await reader.do(job, INLINE + 1, call.attended)
    assert isinstance(encoded, Encoded)
    [prompt] = encoded.prompts
    if prompt.is_estimate:
        raise ContextLengthError(prompt.count, None, hello.max_length, is_estimate=True)
    return json_response({"input_tokens": prompt.count})


async def models(call: Call) -> Response:
    """List the served models."""
    return json_response({"object": "list", "data": [_model(call, each) for each in call.service.models.values()]})


async def model(call: Call) -> Response:
    """Return a model by its name."""
    return json_response(_model(call, call.service.find(call.http.path_params["name"])))


def _model(call: Call, model: ServedModel) -> dict[str, Any]:
    hello = model.fleet.hello
    return {
        "id": model.name,
        "object": "model",
        "created": call.service.started,
        "owned_by": "chairlift",
        "max_model_len": None if hello is None else hello.max_length,
    }


async def request(call: Call) -> Response:
    """Return the state of a request and why it waits: of the tenant's own requests, or of any with an admin key."""
    name = call.http.path_params["id"]
    tenant = None if call.tenant is None or call.tenant.is_admin else call.tenant.name
    # Some clients only show the id of the reply, which is the request's id after a prefix.
    for wanted in dict.fromkeys([name, *(name.removeprefix(front.prefix) for front in FRONTS.values())]):
        found = await _explain(call, wanted, tenant) if NAME.fullmatch(wanted) else None
        if found is not None and found.answers:
            return json_response(
                {"id": wanted, "object": "request", "unfinished": found.unfinished, "answers": found.answers}
            )
    # The same response for another tenant's request and for an unknown id: ids of other tenants are not revealed.
    message = f"no running or waiting request has the id {name[:128]!r} (finished requests are not kept)"
    raise invalid(message, status=404, code="unknown_request")


async def _explain(call: Call, name: str, tenant: str | None) -> Explained:
    fleets = [model.fleet for model in _models(call)]
    working = [fleet for fleet in fleets if fleet.trouble is None]
    answers = [await _ask(fleet, lambda fleet: fleet.explain(name, tenant)) for fleet in working or fleets]
    return max(answers, key=lambda answer: answer.unfinished)


def _models(call: Call) -> Iterable[ServedModel]:
    return call.service.models.values()


async def _ask(fleet: Fleet, question: Callable[[Fleet], Awaitable[T | None]]) -> T:
    """Return the engines' answer to a question, or raise a Failure if there is none in time."""
    if fleet.questions >= _QUESTIONS:
        message = f"{fleet.questions} questions are waiting for the engine: try again in a moment"
        raise Failure(message, 429, "rate_limit_error", "too_many_questions", retry_after=1.0)
    if fleet.trouble is None and (found := await question(fleet)) is not None:
        return found
    raise unavailable(fleet.trouble or "the engine did not answer in time: it is in a long step", 2.0)


async def reset_prefix_cache(call: Call) -> Response:
    """Empty the prefix caches of all engines; running requests keep their blocks."""
    counts = [await _ask(model.fleet, Fleet.reset_prefix_cache) for model in _models(call)]
    return json_response({"blocks": sum(counts)})


async def embeddings(call: Call) -> Response:
    """Reject: a language model that only generates has no embeddings."""
    raise Failure(
        f"{call.model.name} has no embeddings: use /v1/chat/completions or /v1/completions, or serve a model "
        "that has them",
        404,
        "invalid_request_error",
        "embeddings_not_supported",
    )


async def tokenize(call: Call) -> Response:
    """Convert a text or a conversation to token ids."""
    body = await call.body()
    hello = call.choose(body.get("model"))
    reader = call.model.reader
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
    """Convert token ids to text."""
    body = await call.body()
    hello = call.choose(body.get("model"))
    reader = call.model.reader
    ids = get(body, "tokens", "a list of whole numbers")
    if ids is None:
        raise RequestError('tokens must be a list of token ids: {"tokens": [1, 2, 3]}')
    reader.require_tokenizer()
    for token in (min(ids), max(ids)) if ids else ():
        if not 0 <= token < hello.vocab_size:
            raise RequestError(f"tokens holds {token}, but the model's ids go from 0 to {hello.vocab_size - 1}")
    return await call.written(Detokenize(ids), 4 * len(ids))


async def tokenizer_info(call: Call) -> Response:
    """Return the tokenizer's fields, named as in tokenizer_config.json and as in vLLM."""
    hello = call.choose(call.http.query_params.get("model"))
    tokenizer = call.model.reader.require_tokenizer()
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # the class of transformers that reads any tokenizer.json
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "chat_template": tokenizer.chat_template,
            "model_max_length": hello.max_length,
            "vocab_size": tokenizer.vocab_size,
        }
    )


async def health(call: Call) -> Response:
    """Return whether requests are being served: 503 if a model has no engine that works."""
    trouble = call.service.trouble
    status = {"status": "ok"} if trouble is None else {"status": "unhealthy", "reason": trouble}
    return json_response({**status, **_replicas(call)}, 200 if trouble is None else 503)


async def ready(call: Call) -> Response:
    """Return whether new requests are accepted: 503 also while the server drains."""
    trouble = "the server is shutting down" if call.service.is_draining else call.service.trouble
    status = {"status": "ready"} if trouble is None else {"status": "not ready", "reason": trouble}
    service = call.service
    role = {} if service.role == "both" else {"role": service.role, "receives_at": service.receives_at}
    load = _load(call) if service.tells_load else {}
    return json_response({**status, **role, **load, **_replicas(call)}, 200 if trouble is None else 503)


def _load(call: Call) -> dict[str, int]:
    """Return the tokens of requests without a first token, and the sequences that the engines' batches can have."""
    models = _models(call)
    hellos = [model.fleet.hello for model in models]
    return {
        "queued_tokens": sum(model.admission.waiting_tokens for model in models),
        "max_sequences": sum(hello.max_sequences for hello in hellos if hello is not None),
    }


def _replicas(call: Call) -> dict[str, Any]:
    """Return the state of each engine, if there are several."""
    states = {model.name: model.fleet.replicas() for model in _models(call)}
    return {} if sum(map(len, states.values())) == 1 else {"replicas": states}


async def metrics(call: Call) -> Response:
    """Return the metrics for Prometheus."""
    content, kind = call.service.families.render()
    return Response(content, media_type=kind)


async def version(call: Call) -> Response:
    """Return the version."""
    return json_response({"version": __version__})


async def openapi(call: Call) -> Response:
    """Return the OpenAPI description."""
    return json_response(describe(", ".join(call.service.models)))


async def page(call: Call) -> Response:
    """Return the live page."""
    return _asset(call, INDEX)


async def page_asset(call: Call) -> Response:
    """Return a part of the live page: a script, a style sheet or a picture."""
    return _asset(call, call.http.path_params["name"])


def _asset(call: Call, name: str) -> Response:
    found = asset(name, call.http.headers.get("if-none-match"))
    if found is None:
        raise invalid(f"there is no /ui/{name[:100]}", status=404, code="unknown_route")
    return found


async def page_events(call: Call) -> Response:
    """Stream the engines' steps for the live page."""
    assert call.service.page is not None, "without a page there is no route to it"
    return call.service.page.watch()


ROUTES = (
    Route("POST", "/v1/chat/completions", Access.USER, chat_completions),
    Route("POST", "/v1/completions", Access.USER, completions),
    Route("POST", "/v1/responses", Access.USER, responses, RESPONSES),
    Route("GET", "/v1/responses/{id}", Access.USER, response, RESPONSES),
    Route("DELETE", "/v1/responses/{id}", Access.USER, response, RESPONSES),
    Route("POST", "/v1/messages", Access.USER, messages, MESSAGES),
    Route("POST", "/v1/messages/count_tokens", Access.USER, count_tokens, MESSAGES),
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
# The live page and its own stream, which is no part of the API that /openapi.json describes.
PAGE_ROUTES = (
    Route("GET", "/", Access.OPEN, page),
    Route("GET", "/ui/events", Access.ADMIN, page_events),
    Route("GET", "/ui/{name}", Access.OPEN, page_asset),
)
