"""`/openapi.json` is a valid document, lists every route, and real requests and answers are as it says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from starlette.routing import Route

from cluster.config import Config
from services.router.app import create_app
from services.router.http.security_headers import SECURITY_HEADERS

from .chat_model import TIME, USER, Model, call_of


@pytest.fixture(scope="module")
def document(shared_router) -> dict[str, Any]:
    response = shared_router.client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    return response.json()


def check(document: dict[str, Any], name: str, value: object) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    Draft202012Validator(schema).validate(value)


def test_it_is_valid(document: dict[str, Any]) -> None:
    validate(document)
    assert document["info"]["title"] == "Outrider"


def test_every_route_is_in_it(document: dict[str, Any], model_folder) -> None:
    config = Config.model_validate({"target": {"model": str(model_folder), "addresses": ["127.0.0.1:1"]}})
    routes = {
        (re.sub(r":path(?=\})", "", route.path), method)
        for route in create_app(config).routes
        if isinstance(route, Route) and route.include_in_schema
        for method in (route.methods or set()) - {"HEAD"}
    }
    listed = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert listed == routes


def test_every_status_of_the_manual_is_in_it(document: dict[str, Any]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        error = "AnthropicError" if path == "/v1/messages" else "Error"
        answers = document["paths"][path]["post"]["responses"]
        assert answers.keys() == {"200", "400", "401", "403", "404", "408", "413", "415", "429", "431", "500", "503"}
        for status in answers.keys() - {"200"}:
            schema = answers[status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{error}"}
        assert answers["200"]["content"].keys() == {"application/json", "text/event-stream"}


@pytest.mark.parametrize(
    ("name", "request_", "is_right"),
    [
        ("ChatRequest", {"messages": [USER], "tools": [TIME], "tool_choice": "required", "stop": ["a"]}, True),
        ("ChatRequest", {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, True),
        ("ChatRequest", {"messages": [USER], "tool_choice": "maybe"}, False),
        ("ChatRequest", {"messages": [{"role": "wizard"}]}, False),
        ("ChatRequest", {"messages": [USER], "top_p": 1.5}, False),
        ("ChatRequest", {}, False),
        ("CompletionRequest", {"prompt": [[1, 2], [3]], "logit_bias": {"5": -1}}, True),
        ("CompletionRequest", {"prompt": {}}, False),
        ("ResponsesRequest", {"input": "fox", "temperature": 0.5, "truncation": "auto"}, True),
        ("ResponsesRequest", {"input": "fox", "temperature": 3}, False),
        ("MessagesRequest", {"messages": [USER], "max_tokens": 5, "temperature": 0.5, "seed": 1}, True),
        ("MessagesRequest", {"messages": [USER]}, False),
        ("CountTokensRequest", {"messages": [USER], "system": "a"}, True),
        ("TokenizeRequest", {"messages": [USER], "tools": [TIME]}, True),
        ("DetokenizeRequest", {"tokens": [-1]}, False),
    ],
)
def test_requests_are_as_it_says(document: dict[str, Any], name: str, request_: dict[str, Any], is_right: bool) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    assert Draft202012Validator(schema).is_valid(request_) == is_right


def test_answers_are_as_it_says(document: dict[str, Any], model: Model) -> None:
    client = model.router.client
    model.will_say("<think>hm</think>So." + call_of("time", "{}"))
    extras = {"return_token_ids": True, "return_speculation_stats": True, "return_rounds": True}
    chat = {"messages": [USER], "tools": [TIME], **extras}
    tools = [{"type": "function", "name": "time"}]
    custom_tools = [{"type": "custom", "name": "time"}, {"type": "web_search"}]
    message = {"messages": [USER], "max_tokens": 500, "tools": [{"name": "time"}]}
    for path, name, body in [
        ("/v1/completions", "Completion", {"prompt": "fox", **extras}),
        ("/v1/chat/completions", "ChatCompletion", chat),
        ("/v1/responses", "Response", {"input": "fox", "tools": tools}),
        ("/v1/responses", "Response", {"input": "fox", "tools": custom_tools}),
        ("/v1/messages", "Message", message),
        ("/v1/messages", "AnthropicError", message | {"max_tokens": 0}),
        ("/v1/messages/count_tokens", "TokenCount", {"messages": [USER]}),
        ("/tokenize", "Tokens", {"prompt": "fox", "return_token_strs": True}),
        ("/detokenize", "Text", {"tokens": [70]}),
        ("/v1/completions", "Error", {"prompt": "fox", "top_p": 2}),
    ]:
        check(document, name, client.post(path, json=body).json())
    for path, name in [
        ("/v1/models", "ModelList"),
        ("/v1/models/chat-model", "Model"),
        ("/health", "Health"),
        ("/health/live", "Liveness"),
        ("/version", "Version"),
        ("/v1/responses/resp_1", "Error"),
    ]:
        check(document, name, client.get(path).json())
    for path, name, body in [
        ("/v1/completions", "Completion", {"prompt": "fox"}),
        ("/v1/chat/completions", "ChatCompletionChunk", chat | {"stream_options": {"include_usage": True}}),
        ("/v1/responses", "ResponseEvent", {"input": "fox", "tools": tools}),
        ("/v1/responses", "ResponseEvent", {"input": "fox", "tools": custom_tools}),
        ("/v1/messages", "MessageEvent", message),
    ]:
        text = client.post(path, json=body | {"stream": True}).text
        events = re.findall(r"^data: (\{.*)$", text, re.MULTILINE)
        assert events
        for event in events:
            check(document, name, json.loads(event))


def test_docs_is_the_document(shared_router, document: dict[str, Any]) -> None:
    page = shared_router.client.get("/docs")
    assert page.json() == document
    assert page.headers.items() >= SECURITY_HEADERS.items()
