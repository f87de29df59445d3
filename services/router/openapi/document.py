"""The OpenAPI document: every route, its input and its possible answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.router.access.gate import PROBES
from services.router.anthropic.endpoint import COUNT_TOKENS_PATH
from services.router.anthropic.request import PASSED_ON as PASSED_ON_BY_MESSAGES
from services.router.anthropic.request import CountTokensRequest, MessagesRequest
from services.router.anthropic_errors import MESSAGES_PATH
from services.router.api.completions import CompletionRequest
from services.router.chat.endpoint import ChatRequest
from services.router.chat.tokens import DETOKENIZE_PATHS, TOKENIZE_PATHS, DetokenizeRequest, TokenizeRequest
from services.router.openapi.answers import ANSWERS, Schema, reference
from services.router.responses.endpoint import INPUT_TOKENS_PATH
from services.router.responses.request import PASSED_ON, ResponsesRequest

_REQUESTS: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)

_ABOUT = (
    "Errors have the envelope `Error`, those of `/v1/messages` `AnthropicError`. In a request `null` is the same as "
    "leaving a field out, and a field that is not listed is ignored with a warning in the log, or refused where it is "
    "known and not supported."
)

_REASONS = {
    200: "as requested",
    400: "a field is invalid (`param` names it), or the path has a control character",
    401: "the API key is missing, or does not allow this request",
    403: "another site's name or page, on a router without keys at a loopback address",
    404: "the route, model or response does not exist",
    408: "the body did not arrive in time",
    413: "the body is over `router.max_body_bytes`",
    415: "the body is not `application/json`",
    429: "the key is over its limit; retry after `retry-after` seconds",
    431: "the headers are too many or too long",
    500: "an internal error",
    503: "no target can answer, or too many requests are in flight; retry after `retry-after` seconds",
}
_OF_BODIES = (400, 404, 408, 413, 415, 431, 500)
_OF_ANSWERS = (*_OF_BODIES, 503)


@dataclass(frozen=True)
class Operation:
    """One method of one route."""

    method: str
    path: str
    summary: str
    answer: str | None  # schema of its answer; None: the answer has no JSON body
    body: type[BaseModel] | None = None
    event: str | None = None  # schema of an event of a streamed answer
    errors: Sequence[int] = (500,)
    media_type: str = "application/json"
    error: str = "Error"  # schema of errors
    unavailable: str | None = None  # schema of the answer with status 503, if it differs


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST", "/v1/completions", "Text after a prompt", "Completion", CompletionRequest, "Completion", _OF_ANSWERS
    ),
    Operation(
        "POST",
        "/v1/chat/completions",
        "The assistant's next message",
        "ChatCompletion",
        ChatRequest,
        "ChatCompletionChunk",
        _OF_ANSWERS,
    ),
    Operation(
        "POST",
        "/v1/responses",
        "The assistant's next items",
        "Response",
        ResponsesRequest,
        "ResponseEvent",
        _OF_ANSWERS,
    ),
    *(
        Operation(method, f"/v1/responses/{{response_id}}{path}", "Nothing is stored", None, errors=(404, 500))
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"))
    ),
    Operation(
        "POST",
        MESSAGES_PATH,
        "The assistant's next message, in Anthropic's form",
        "Message",
        MessagesRequest,
        "MessageEvent",
        _OF_ANSWERS,
        error="AnthropicError",
    ),
    Operation(
        "POST",
        COUNT_TOKENS_PATH,
        "The number of tokens of a message's prompt",
        "TokenCount",
        CountTokensRequest,
        errors=_OF_ANSWERS,
        error="AnthropicError",
    ),
    Operation("GET", "/v1/models", "The model, its other names and its adapters", "ModelList"),
    Operation("GET", "/v1/models/{model}", "The model or adapter with a name", "Model", errors=(404, 500)),
    Operation(
        "POST",
        INPUT_TOKENS_PATH,
        "The number of tokens of a response's prompt",
        "TokenCount",
        ResponsesRequest,
        errors=_OF_ANSWERS,
    ),
    *(
        Operation("POST", path, "The token IDs of a prompt or of a chat", "Tokens", TokenizeRequest, errors=_OF_ANSWERS)
        for path in TOKENIZE_PATHS
    ),
    *(
        Operation("POST", path, "The text of token IDs", "Text", DetokenizeRequest, errors=_OF_ANSWERS)
        for path in DETOKENIZE_PATHS
    ),
    Operation("GET", "/health", "Whether a target can answer", "Health", errors=(500, 503), unavailable="Health"),
    Operation("GET", "/health/live", "Whether the router answers", "Liveness"),
    Operation("GET", "/ping", "Whether a target can answer", "", errors=(500, 503), unavailable=""),
    Operation("POST", "/ping", "Whether a target can answer", "", errors=(500, 503), unavailable=""),
    Operation("GET", "/metrics", "Prometheus metrics", "", media_type="text/plain"),
    Operation("GET", "/version", "The version of Outrider", "Version"),
    Operation("GET", "/openapi.json", "This document", ""),
    Operation("GET", "/docs", "This document", ""),
)


def openapi_document(version: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": version, "description": _ABOUT},
        "security": [{"key": []}, {"x-api-key": []}, {}],  # {}: without configured keys no key is required
        "paths": paths,
        "components": {
            "schemas": _request_schemas() | ANSWERS,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    is_probe = operation.path in PROBES
    errors = sorted({400, 403, *operation.errors} | (set() if is_probe else {401, 429}))
    described: dict[str, Any] = {
        "operationId": _identifier(operation),
        "summary": operation.summary,
        "responses": {str(status): _response(operation, status) for status in errors},
    }
    if is_probe:
        described["security"] = []
    if operation.answer is not None:
        described["responses"] = {"200": _success(operation)} | described["responses"]
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.body is not None:
        content = {"application/json": {"schema": reference(operation.body.__name__)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _success(operation: Operation) -> dict[str, Any]:
    response: dict[str, Any] = {"description": _REASONS[200]}
    if operation.answer:
        response["content"] = {"application/json": {"schema": reference(operation.answer)}}
    elif operation.path != "/ping":
        response["content"] = {operation.media_type: {}}
    if operation.event is not None:
        response["description"] += "; with `stream`, server-sent events, each with this as its data"
        response["content"]["text/event-stream"] = {"schema": reference(operation.event)}
    if operation.event is not None:
        response["headers"] = {
            "x-outrider-seed": {"description": "the seed of the answer", "schema": {"type": "integer"}}
        }
    return response


def _response(operation: Operation, status: int) -> dict[str, Any]:
    response: dict[str, Any] = {"description": _REASONS[status]}
    schema = operation.error
    if status == 503 and operation.unavailable is not None:
        schema = operation.unavailable
    if schema:
        response["content"] = {"application/json": {"schema": reference(schema)}}
    return response


def _identifier(operation: Operation) -> str:
    words = operation.path.replace("{", "").replace("}", "").replace(".", "/").split("/")
    return "_".join([operation.method.lower(), *filter(None, words)])


def _request_schemas() -> dict[str, Schema]:
    _, document = models_json_schema(
        [(request, "validation") for request in _REQUESTS], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Schema] = {name: _untitled(schema) for name, schema in document["$defs"].items()}
    chat, responses = schemas["ChatRequest"]["properties"], schemas["ResponsesRequest"]["properties"]
    chat["tool_choice"]["default"] = "auto"
    responses |= {name: chat[name] for name in PASSED_ON}
    for kind in (MessagesRequest, CountTokensRequest):
        schemas[kind.__name__]["properties"] |= {name: chat[name] for name in PASSED_ON_BY_MESSAGES}
    used = _references({request.__name__: schemas[request.__name__] for request in _REQUESTS}, schemas)
    return {name: schema for name, schema in schemas.items() if name in used}


def _untitled(value: Any) -> Any:
    """Returns `value` without pydantic's titles, which repeat the field's name."""
    if isinstance(value, Mapping):
        return {key: _untitled(item) for key, item in value.items() if not (key == "title" and isinstance(item, str))}
    return [_untitled(item) for item in value] if isinstance(value, list) else value


def _references(found: dict[str, Schema], schemas: Mapping[str, Schema]) -> set[str]:
    """Returns the names in `found`, and those that their schemas refer to, also indirectly."""
    names = set(found)
    waiting: list[Any] = list(found.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            name = str(value.get("$ref", "")).rpartition("/")[2]
            if name and name not in names:
                names.add(name)
                waiting.append(schemas[name])
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return names
