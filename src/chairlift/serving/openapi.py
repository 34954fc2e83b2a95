"""The OpenAPI description of the routes."""

from __future__ import annotations

from typing import Any

from chairlift import __version__
from chairlift.core.params import ABOUT
from chairlift.openai.params import FIELDS
from chairlift.serving.encoding import LONGEST, MOST

Schema = dict[str, Any]


def _number(low: float | None = None, high: float | None = None, **more: Any) -> Schema:
    found: Schema = {"type": ["number", "null"], **more}
    if low is not None:
        found["minimum"] = low
    if high is not None:
        found["maximum"] = high
    return found


def _whole(low: float | None = None, high: float | None = None) -> Schema:
    return {**_number(low, high), "type": ["integer", "null"]}


_TEXT: Schema = {"type": "string", "minLength": 1}
_SWITCH: Schema = {"type": ["boolean", "null"]}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}

# Constraints beyond a field's type and range.
_BESIDES: dict[str, Schema] = {
    "top_p": {"exclusiveMinimum": 0},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "prompt_logprobs": {"minimum": 0},  # -1 is valid only for LLM
    "truncate_prompt_tokens": {"not": {"const": 0}},
}


def _sampling(name: str, kind: str) -> Schema:
    """Return the schema of a field of SamplingParams, from its own range and description."""
    about = ABOUT[name]
    found: Schema
    match kind:
        case "a whole number":
            found = _whole(about.low, about.high)
        case "a number":
            found = _number(about.low, about.high)
        case "true or false":
            found = dict(_SWITCH)
        case "true, false or 'never'":
            found = {"enum": [True, False, "never", None]}
        case "a list of whole numbers":
            found = {
                "anyOf": [
                    {**_IDS, "minItems": int(name == "allowed_token_ids"), "maxItems": MOST[name]},
                    {"type": "null"},
                ]
            }
        case _:
            text = {**_TEXT, "maxLength": LONGEST[name]}
            found = {"anyOf": [text, {"type": "array", "items": text, "maxItems": MOST[name]}, {"type": "null"}]}
    return {**found, **_BESIDES.get(name, {}), "description": about.text}


_SCHEMA: Schema = {"type": "object", "description": "A JSON schema.", "example": {"type": "object"}}
_STRUCTURED: Schema = {
    "type": ["object", "null"],
    "properties": {
        "json": _SCHEMA,
        "json_object": _SWITCH,
        "regex": _TEXT,
        "choice": {"type": "array", "items": _TEXT, "minItems": 1},
        "grammar": {**_TEXT, "description": "In Lark's or GBNF's notation."},
        "structural_tag": {"type": "object"},
    },
    "maxProperties": 1,
}
_TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
                "description": _TEXT,
                "parameters": _SCHEMA,
                "strict": _SWITCH,
            },
        },
    },
}
_SAMPLING: dict[str, Schema] = {
    "model": {"type": ["string", "null"]},
    **{name: _sampling(name, kind) for name, kind in FIELDS.items()},
    "max_tokens": {**_whole(1), "description": ABOUT["max_tokens"].text},
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,6}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MOST["logit_bias"],
        "description": ABOUT["logit_bias"].text,
    },
    "structured": {**_STRUCTURED, "description": ABOUT["structured"].text},
    "structured_outputs": _STRUCTURED,
    "response_format": {
        "anyOf": [
            {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}},
            {
                "type": "object",
                "required": ["type", "json_schema"],
                "properties": {
                    "type": {"const": "json_schema"},
                    "json_schema": {
                        "type": "object",
                        "required": ["name", "schema"],
                        "properties": {"name": _TEXT, "schema": _SCHEMA, "strict": _SWITCH},
                    },
                },
            },
            {"type": "null"},
        ]
    },
    "stream": _SWITCH,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _SWITCH, "continuous_usage_stats": _SWITCH},
    },
    "timeout": _number(0, 604800, exclusiveMinimum=0),
    "priority": _whole(-(2**31), 2**31),
    "ttft": _number(0, 604800, exclusiveMinimum=0),
    "cache_salt": {"type": ["string", "null"], "minLength": 1, "maxLength": 256},
    "request_id": {"type": ["string", "null"], "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    "return_token_ids": _SWITCH,
    "user": {"type": ["string", "null"]},
}
_CONTENT: Schema = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}
_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": "string", "description": "A JSON object.", "example": "{}"},
            },
        },
    },
}
_MESSAGE: Schema = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": _CONTENT,
            },
        },
        {
            "type": "object",
            "required": ["role", "tool_calls"],
            "properties": {
                "role": {"const": "assistant"},
                "content": {"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
                "tool_calls": {"type": "array", "items": _CALL, "minItems": 1},
            },
        },
    ]
}
_CHAT: Schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        **_SAMPLING,
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MOST["messages"]},
        "max_completion_tokens": _whole(1),
        "logprobs": _SWITCH,
        "top_logprobs": _whole(0, 64),
        "add_generation_prompt": _SWITCH,
        "continue_final_message": _SWITCH,
        "chat_template_kwargs": {"type": ["object", "null"]},
        "reasoning_effort": {"type": ["string", "null"]},
        "prediction": {
            "type": ["object", "null"],
            "required": ["type", "content"],
            "properties": {"type": {"const": "content"}, "content": {"type": ["string", "array"]}},
            "description": "Text that the answer may repeat: with --speculation ngram it is drafted.",
        },
        "tools": {"type": ["array", "null"], "items": _TOOL, "maxItems": 128},
        "tool_choice": {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                {
                    "type": "object",
                    "required": ["type", "function"],
                    "properties": {
                        "type": {"const": "function"},
                        "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
                    },
                },
            ]
        },
        "parallel_tool_calls": _SWITCH,
        "max_thinking_tokens": {**_whole(0), "description": "Tokens of reasoning at most."},
        "include_reasoning": _SWITCH,
    },
}
_COMPLETION: Schema = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        **_SAMPLING,
        "prompt": {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 256},
                {**_IDS, "minItems": 1},
                {"type": "array", "items": {**_IDS, "minItems": 1}, "minItems": 1, "maxItems": 256},
            ]
        },
        "echo": _SWITCH,
        "suffix": {
            **_TEXT,
            "type": ["string", "null"],
            "description": "What follows the answer.",
        },
        "logprobs": _whole(0, 64),
    },
}
_TOKENIZE: Schema = {
    "type": "object",
    "anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    "properties": {
        "model": {"type": ["string", "null"]},
        "prompt": {"type": "string"},
        "messages": _CHAT["properties"]["messages"],
        "add_special_tokens": _SWITCH,
        "return_token_strs": _SWITCH,
    },
}
_DETOKENIZE: Schema = {
    "type": "object",
    "required": ["tokens"],
    "properties": {"model": {"type": ["string", "null"]}, "tokens": _IDS},
}
_SHARED = ("model", "temperature", "top_p", "top_k", "stream")
_RESPONSE: Schema = {
    "type": "object",
    "required": ["input"],
    "properties": {
        **{name: _SAMPLING[name] for name in _SHARED},
        "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]},
        "instructions": {"type": ["string", "null"]},
        "max_output_tokens": _whole(1),
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        "text": {"type": "object"},
    },
}
_COUNT: Schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "model": _SAMPLING["model"],
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"enum": ["user", "assistant"]}, "content": _CONTENT},
            },
        },
        "system": _CONTENT,
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
    },
}
_MESSAGES: Schema = {
    "type": "object",
    "required": ["messages", "max_tokens"],
    "properties": {
        **{name: _SAMPLING[name] for name in _SHARED},
        **_COUNT["properties"],
        "max_tokens": {"type": "integer", "minimum": 1},
        "stop_sequences": {"type": "array", "items": {**_TEXT, "maxLength": LONGEST["stop"]}, "maxItems": MOST["stop"]},
    },
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REFUSALS = {
    "400": "the request is not valid",
    "401": "no valid API key",
    "403": "the key lacks this permission",
    "404": "no such model, or no such request",
    "408": "the request timed out",
    "413": "the body is too large",
    "429": "too many requests: try again after Retry-After seconds",
    "500": "the engine failed",
    "503": "the engine is not running: try again after Retry-After seconds",
}


def _reply(kinds: dict[str, Schema], *refusals: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "the answer", "content": {kind: {"schema": schema} for kind, schema in kinds.items()}},
        **{status: {"description": _REFUSALS[status], "content": error} for status in refusals},
    }


def _post(summary: str, body: Schema, *refusals: str, streams: bool = False) -> dict[str, Any]:
    kinds: dict[str, Schema] = {"application/json": {"type": "object"}}
    if streams:
        kinds["text/event-stream"] = {"type": "string"}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": _reply(kinds, "400", "401", "404", "413", "503", *refusals),
        }
    }


def _get(summary: str, *refusals: str, kind: str = "application/json") -> dict[str, Any]:
    schema = {"type": "object"} if kind == "application/json" else {"type": "string"}
    return {"get": {"summary": summary, "responses": _reply({kind: schema}, *refusals)}}


def describe(model: str) -> Schema:
    """Return the API as an OpenAPI 3.1 document."""
    more = ("403", "408", "429", "500")
    named: Schema = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "example": model}}
    one_model = _get("The model by its name", "401", "404")
    one_model["get"]["parameters"] = [named]
    one_request = _get("The state of a request, and why it waits", "401", "404", "429", "503")
    by_id: list[Schema] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    one_request["get"]["parameters"] = by_id
    reset = {"summary": "Empty the prefix cache"}
    answers = _reply({"application/json": {"type": "object"}}, "401", "403", "429", "503")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Chairlift", "version": __version__, "description": f"OpenAI-compatible API for {model}."},
        "paths": {
            "/v1/chat/completions": _post("A conversation's next message", _CHAT, *more, streams=True),
            "/v1/completions": _post("A text's continuation", _COMPLETION, *more, streams=True),
            "/v1/models": _get("The models that are served", "401"),
            "/v1/models/{name}": one_model,
            "/v1/requests/{id}": one_request,
            "/v1/embeddings": {"post": {"summary": "Refused", "responses": _reply({}, "401", "404")}},
            "/tokenize": _post("Text or a conversation to token ids", _TOKENIZE, "429"),
            "/detokenize": _post("Token ids to text", _DETOKENIZE, "429"),
            "/tokenizer_info": _get("The tokenizer's special tokens and chat template", "400", "401", "503"),
            "/health": _get("Whether requests are being served", "503"),
            "/ready": _get("Whether new requests are accepted", "503"),
            "/version": _get("The version of Chairlift"),
            "/metrics": _get("Metrics for Prometheus", "401", "403", kind="text/plain"),
            "/reset_prefix_cache": {"post": {**reset, "responses": answers}},
            "/openapi.json": _get("This description"),
            "/v1/responses": _post("An answer, in OpenAI's Responses API", _RESPONSE, *more, streams=True),
            "/v1/responses/{id}": {
                method: {"summary": "Refused", "parameters": by_id, "responses": _reply({}, "401", "404")}
                for method in ("get", "delete")
            },
            "/v1/messages": _post("An answer, in Anthropic's Messages API", _MESSAGES, *more, streams=True),
            "/v1/messages/count_tokens": _post("The tokens of a conversation, in that API", _COUNT, "429"),
        },
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "key_alone": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
