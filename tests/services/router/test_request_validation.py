"""Tests of the requests that the router refuses, of its error messages, and of the requests that it accepts."""

from __future__ import annotations

import functools
import http.client
import json
import logging
import math
import re

import pytest

from tests.waiting import WAIT_S

from .conftest import MAX_MODEL_LEN, MAX_SPECULATIVE_TOKENS, Router

BAD_SCHEMAS = [
    5,
    "nonsense",
    {"multipleOf": 5},
    {"type": "array", "uniqueItems": True},
    {"properties": {"a": {"not": {"type": "null"}}}},
    {"properties": {"a": {"$ref": "https://example.com/schema"}}},
    {"type": "string", "pattern": "a{6,}b", "maxLength": 5},
    {"type": "string", "format": "colour"},
    {"allOf": [{"type": "object"}, {"type": "object"}]},
    functools.reduce(lambda schema, _: {"items": schema}, range(65), {}),
]

BAD_FIELDS = [
    ("prompt", [None, "", [], [""], [[]], 5, True, {"text": "x"}]),
    ("prompt", [[1, "a"], ["a", 1], ["a", [1]], [[1], "a"], [1.0], [True], [[[1]]], [None]]),
    ("prompt", [["a", ""], [[1], []], [[1], [True]], ["a", None], ["a"] * 257, [[1]] * 257, [[1], [100_000]]]),
    ("prompt", [[-1], [5, 10**30], [100_000]]),
    ("model", [5, ["x"]]),
    ("max_tokens", [-1, 1.5, "5", True, MAX_MODEL_LEN, 10**30]),
    ("temperature", [-0.1, 2.1, "0.5", True, [1], 10**400]),
    ("top_p", [0, -1, 1.01, "1", False]),
    ("top_k", [-2, 1.5, "3", True]),
    ("min_p", [-0.1, 1.1, "0", True]),
    ("repetition_penalty", [0, -1, 1000, "1", True]),
    ("presence_penalty", [-2.1, 2.1, "0", True]),
    ("frequency_penalty", [-2.1, 2.1, "0", True]),
    ("logit_bias", [[], "5", {"5": "1"}, {"5": True}, {"5": 101}, {"5": -100.5}, {"five": 1}]),
    ("logit_bias", [{"-1": 1}, {"100000": 1}, {"05": 1}, {"": 1}, {" 5": 1}, {"٥": 1}, {"9" * 5000: 1}]),
    ("logit_bias", [{str(token): 1 for token in range(1025)}]),
    ("seed", [1.5, "1", True, 2**63, -(2**63) - 1, [1]]),
    ("ignore_eos", [0, 1, "true"]),
    ("stream", [1, "true"]),
    ("stream_options", [{"include_usage": True}, 5]),
    ("num_speculative_tokens", [-1, MAX_SPECULATIVE_TOKENS + 1, 1.5, "4", "Auto", True]),
    ("outrider", [5, [], {"output_token_ms": 0}, {"output_token_ms": "40"}, {"output_token_ms": True}, {"tpot": 40}]),
    ("n", [0, -1, 129, 10**6, 10**30, True, 1.5, "1", [1]]),
    ("best_of", [2]),
    ("stop", ["", [""], ["x", ""], [5], 5, True, {"x": "y"}, ["x", None], [["x"]], ["x"] * 17, "x" * 4097]),
    ("include_stop_str_in_output", [1, "true"]),
    ("return_token_ids", [1, "true"]),
    ("return_rounds", [1, "true"]),
    ("stop_token_ids", [1, ["1"], [True], [-1], [10**6], [[1]], [1] * 257]),
    ("echo", [1, "true"]),
    ("logprobs", [-1, 21, True, "5", 1.5]),
    ("prompt_logprobs", [-1, 21, True, "0"]),
    ("suffix", ["x"]),
    ("response_format", ["text", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": ["text"]}]),
    ("response_format", [{"type": "json_schema", "json_schema": {"schema": schema}} for schema in BAD_SCHEMAS]),
    ("structured_outputs", [{}, "x", {"regex": "a", "choice": ["b"]}, {"regex": ""}, {"regex": 5}, {"yaml": "x"}]),
    ("structured_outputs", [{"json": "{"}, {"json_object": 1}, {"choice": []}]),
    ("guided_json", [5, "nonsense", {"multipleOf": 5}]),
    ("guided_regex", ["", 5, ["a"]]),
    ("guided_choice", [[], "yes", [""], [5], ["a"] * 1025]),
    ("guided_grammar", ["", 5, {}]),
    ("min_tokens", [-1, True, "1", 1.5, 17]),
    ("bad_words", ["x", [""], [5], ["x"] * 257, ["x" * 257]]),
    ("allowed_token_ids", [[], 5, ["1"], [-1], [10**6]]),
    ("priority", [1.5, "1", True, 2**31]),
    ("request_id", ["", "a b", "a\r\nb", "x" * 129, 5]),
    ("cache_salt", ["", 5, "x" * 1025]),
    ("return_tokens_as_token_ids", [1, "true"]),
    ("spaces_between_special_tokens", [1]),
    ("vllm_xargs", [5, []]),
    ("skip_special_tokens", [0, "true"]),
    ("truncate_prompt_tokens", [-2, 1.5, "3"]),
    ("add_special_tokens", [1]),
]


USER = {"role": "user", "content": "fox"}
BAD_PARTS = [
    {},
    {"type": "text"},
    {"type": "text", "text": None},
    {"type": "text", "text": 5},
    {"type": "image_url", "image_url": {"url": "data:,"}},
    {"type": ["text"], "text": "fox"},
]

ASSISTANT = {"role": "assistant", "content": "dog"}
TOOL = {"type": "function", "function": {"name": "f"}}
BAD_CALLS = [
    5,
    {},
    {"type": "custom", "function": {"name": "f"}},
    {"type": "custom", "custom": {"name": "f", "input": 5}},
    {"type": "mcp", "function": {"name": "f"}},
    {"id": 5, "function": {"name": "f"}},
    {"function": {"name": ""}},
    {"function": {"name": "f", "arguments": 5}},
    {"function": {"name": "f", "arguments": ["a"]}},
]
BAD_FUNCTIONS = [
    {"description": 5},
    {"strict": 1},
    {"parameters": []},
    {"parameters": {"type": "string"}},
    {"parameters": functools.reduce(lambda inner, _: {"items": inner}, range(40), {})},
]

BAD_CHAT_FIELDS = [
    ("messages", [None, [], "fox", 5, USER, [None], ["fox"], [[]], [USER, {}]]),
    (
        "messages",
        [[{"role": role, "content": "fox"}] for role in (None, "", "User", "wizard", 5, ["user"])],
    ),
    ("messages", [[{"role": "user", "content": content}] for content in (None, 5, True, [], [5], {"text": "fox"})]),
    ("messages", [[{"role": "user", "content": [part]}] for part in BAD_PARTS]),
    ("messages", [[USER | {"tool_calls": [{}]}], [USER | {"name": 5}]]),
    ("messages", [[USER | {"content": "x" * 2 * MAX_MODEL_LEN}]]),
    ("max_tokens", [0, -1, 1.5, "5", True, MAX_MODEL_LEN, 10**30]),
    ("max_completion_tokens", [0, -1, 1.5, "5", True, MAX_MODEL_LEN, 10**30]),
    ("add_generation_prompt", [1, "true"]),
    ("n", [0, 129, 10**6, True]),
    ("stop", ["", ["x"] * 17, 5]),
    ("temperature", [-0.1, "0.5", True]),
    ("seed", [True, 2**63]),
    ("stream_options", [{"include_usage": True}]),
    (
        "messages",
        [[USER | {"tool_call_id": "x"}], [{"role": "tool", "content": 5}], [ASSISTANT | {"tool_calls": 5}]],
    ),
    (
        "messages",
        [[USER | answered] for answered in ({"refusal": "No."}, {"audio": {"id": "a"}}, {"function_call": {}})],
    ),
    ("messages", [[ASSISTANT | answered] for answered in ({"refusal": 5}, {"audio": 5}, {"function_call": {}})]),
    ("messages", [[USER | {"content": [{"type": "refusal", "refusal": "No."}]}], [{"role": "user"}]]),
    ("messages", [[ASSISTANT | {"tool_calls": [call]}] for call in BAD_CALLS]),
    ("messages", [[ASSISTANT | {"content": [5]}], [ASSISTANT | {"reasoning_content": 5}]]),
    ("tools", [5, {}, [5], [TOOL, TOOL], [TOOL | {"type": 5}], [TOOL | {"function": None}], [{}]]),
    ("tools", [[{"type": "function", "function": {"name": name}}] for name in (None, "", "a b", "x" * 129, "é", 5)]),
    ("tools", [[{"type": "function", "function": {"name": "f"} | more}] for more in BAD_FUNCTIONS]),
    (
        "tool_choice",
        ["required", "maybe", 5, {}, {"type": "function"}, {"type": "function", "function": {"name": "f"}}],
    ),
    ("parallel_tool_calls", [1, "true"]),
    ("include_reasoning", [1]),
    ("response_format", [{"type": "xml"}, {"type": "json_schema", "json_schema": {"schema": 5}}]),
    ("logprobs", [1, 0, "true"]),
    ("top_logprobs", [1, -1, 21, True]),
    ("stop_token_ids", [[10**6]]),
    ("echo", [True, 1]),
    ("chat_template", ["{{ messages }}"]),
    ("continue_final_message", [True, "no"]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD_FIELDS for value in values])
def test_a_bad_value_is_400_naming_the_field(shared_router, field, value):
    response = shared_router.complete(**({"prompt": "fox"} | {field: value}))
    assert_error(response, 400, "invalid_request_error", field)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD_CHAT_FIELDS for value in values])
def test_a_bad_value_in_a_chat_is_400_naming_the_field(shared_router, field, value):
    response = shared_router.chat(**({"messages": [USER]} | {field: value}))
    assert_error(response, 400, "invalid_request_error", field)


def test_what_is_refused_is_not_started(router, target):
    for fields in ({"prompt": ["fox", [1]]}, {"prompt": [[1], [1] * MAX_MODEL_LEN]}, {"prompt": [[1], [10**6]]}):
        assert_error(router.complete(n=2, **fields), 400, "invalid_request_error", "prompt")
    assert_error(router.complete(prompt=["fox"] * 9, n=114), 400, "invalid_request_error", "n")
    assert_error(router.chat(messages=[]), 400, "invalid_request_error", "messages")
    assert target.requests == []


def assert_error(response, status: int, kind: str, param: str | None = None) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 500
    assert "/work" not in error["message"]
    assert "Traceback" not in error["message"]
    assert (error["type"], error["param"]) == (kind, param)
    if param is not None:
        assert param in error["message"]
    assert response.headers["x-request-id"]
    return error


GOOD_FIELDS = [
    ("prompt", [["fox"], [[1, 2]], [299 - 40], ["a", "b"], [[1], [2]]]),
    ("model", [None, "tiny-model"]),
    ("max_tokens", [None, 1, MAX_MODEL_LEN - 3]),
    ("temperature", [None, 0, 0.0, 2, 1e-9]),
    ("top_p", [1, 1e-9]),
    ("top_k", [-1, 0, 1, 10**12]),
    ("min_p", [0, 1]),
    ("presence_penalty", [-2, 2]),
    ("logit_bias", [{}, None, {"0": 100, "5": -100}]),
    ("seed", [None, 0, 2**63 - 1, -(2**63)]),
    ("num_speculative_tokens", [None, 0, MAX_SPECULATIVE_TOKENS, "auto"]),
    ("outrider", [None, {}, {"output_token_ms": None}, {"output_token_ms": 40}, {"output_token_ms": 0.5}]),
    ("stream_options", [None]),
    ("n", [1, None, 128]),
    ("stop", [None, [], "\n", ["\n", "."], ["x"] * 16]),
    ("echo", [False]),
    ("logprobs", [None]),
    ("response_format", [{"type": "text"}]),
    ("user", ["me", 5]),
]


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
GOOD_CHAT_FIELDS = [
    ("messages", [[{"role": role, "content": "fox"}] for role in ("system", "developer", "user", "assistant")]),
    ("messages", [[USER | {"content": ""}], [USER | {"content": [{"type": "text", "text": "fox"}]}]]),
    ("messages", [[USER | {"name": "me", "tool_calls": None, "refusal": None, "mood": "good"}]]),
    ("max_tokens", [None, 1]),
    ("max_completion_tokens", [None, 1]),
    ("add_generation_prompt", [None, False]),
    ("messages", [[USER, ASSISTANT | {"content": None, "tool_calls": [CALL]}, RESULT]]),
    ("messages", [[USER, ASSISTANT | {"reasoning_content": "hm"}, USER]]),
    ("tools", [None, [], [TOOL], [TOOL | {"function": {"name": "f", "parameters": {}, "strict": True}}]]),
    ("tool_choice", ["none", "auto", None]),
    ("parallel_tool_calls", [True, False, None]),
    ("logprobs", [None, False]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in GOOD_CHAT_FIELDS for value in values])
def test_a_good_value_in_a_chat_is_served(shared_router, field, value):
    response = shared_router.chat(**({"messages": [USER], "max_tokens": 5} | {field: value}))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in GOOD_FIELDS for value in values])
def test_a_good_value_is_served(shared_router, field, value):
    response = shared_router.complete(**({"prompt": [70, 71, 72]} | {field: value}))
    assert response.status_code == 200, response.text


def test_prompt_and_max_tokens_over_the_context_says_the_numbers(shared_router):
    response = shared_router.complete(prompt=[1, 2, 3], max_tokens=MAX_MODEL_LEN - 2)
    error = assert_error(response, 400, "invalid_request_error", "max_tokens")
    assert error["code"] == "context_length_exceeded"
    assert all(str(number) in error["message"] for number in (3, MAX_MODEL_LEN - 2, MAX_MODEL_LEN))


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_conversation_longer_than_the_context_says_the_limit(shared_router, max_tokens):
    messages = [USER] * MAX_MODEL_LEN
    response = shared_router.chat(messages=messages, max_tokens=max_tokens)
    error = assert_error(response, 400, "invalid_request_error", "messages")
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in error["message"]


def test_an_unsupported_field_says_so(shared_router):
    error = shared_router.complete(prompt="fox", suffix="dog").json()["error"]
    assert "not supported yet" in error["message"]


def test_a_missing_prompt_is_named(shared_router):
    assert_error(shared_router.complete(max_tokens=1), 400, "invalid_request_error", "prompt")


def test_an_unknown_model_is_404(shared_router):
    response = shared_router.complete(prompt="fox", model="m" * 5000)
    assert assert_error(response, 404, "not_found_error", "model")["code"] == "model_not_found"


def test_an_unknown_field_is_ignored_with_a_warning(shared_router, caplog):
    with caplog.at_level(logging.WARNING):
        response = shared_router.complete(prompt="fox", frobnicate=1, user="me")
    assert response.status_code == 200
    warnings = [record.getMessage() for record in caplog.records]
    assert any("'frobnicate'" in warning for warning in warnings)
    assert not any("user" in warning for warning in warnings)


def test_usage_of_a_stream_is_strict_too(shared_router):
    response = shared_router.complete(prompt="fox", stream=True, stream_options={"include_usage": 1})
    assert_error(response, 400, "invalid_request_error", "stream_options.include_usage")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": "fox", "temperature": NaN}',
        b'{"prompt": "fox", "temperature": Infinity}',
        b'{"prompt": "fox", "temperature": -Infinity}',
        b'{"prompt": "fox", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "fox", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "fox", "seed": ' + b"9" * 6000 + b"}",
        b"{'prompt': 'fox'}",
        '{"prompt": "fox"}'.encode("utf-16"),
    ],
)
def test_a_body_that_is_no_json_object_is_400(shared_router, body):
    response = shared_router.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert_error(response, 400, "invalid_request_error", response.json()["error"]["param"])


@pytest.mark.parametrize("media_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_another_content_type_is_415(shared_router, media_type):
    headers = {} if media_type is None else {"content-type": media_type}
    response = shared_router.client.post("/v1/completions", content=b'{"prompt": "fox"}', headers=headers)
    assert_error(response, 415, "invalid_request_error")


def test_a_charset_beside_the_content_type_is_fine(shared_router):
    response = shared_router.client.post(
        "/v1/completions",
        content=b'{"prompt": "fox"}',
        headers={"content-type": "Application/JSON; charset=utf-8"},
    )
    assert response.status_code == 200


def test_a_body_over_the_limit_is_413(shared_router):
    response = shared_router.complete(prompt="x" * 20_000)
    assert_error(response, 413, "invalid_request_error")


def test_a_body_over_the_limit_without_a_length_is_413(shared_router):
    def chunks():
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 1000

    response = shared_router.client.post(
        "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
    )
    assert_error(response, 413, "invalid_request_error")


def test_an_announced_length_over_the_limit_is_413_before_the_body(shared_router):
    connection = http.client.HTTPConnection(shared_router.url.removeprefix("http://"), timeout=WAIT_S)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", "1000000000")
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["type"] == "invalid_request_error"
    connection.close()


def test_unknown_routes_and_methods_use_the_envelope(shared_router):
    client = shared_router.client
    assert_error(client.get("/v1/nothing"), 404, "not_found_error")
    assert_error(client.get("/v2/completions"), 404, "not_found_error")
    refused = client.get("/v1/completions")
    assert_error(refused, 405, "invalid_request_error")
    assert refused.headers["allow"] == "POST"


def test_a_clients_request_id_is_echoed_apart_from_the_routers(shared_router):
    client = shared_router.client
    ids = set()
    for given in ({"x-request-id": "mine-1"}, {"x-client-request-id": "mine-1"}):
        answer = client.get("/nothing", headers={"x-request-id": "other"} | given)
        assert answer.headers["x-client-request-id"] == "mine-1"
        ids.add(answer.headers["x-request-id"])
    for unusable in ("x" * 129, "two words", ""):
        answer = client.get("/version", headers={"x-request-id": unusable})
        assert "x-client-request-id" not in answer.headers
        ids.add(answer.headers["x-request-id"])
    assert len(ids) == 5
    assert all(re.fullmatch("[0-9a-f]{32}", drawn) for drawn in ids)


def test_a_nan_from_a_careless_client_is_refused(shared_router):
    body = json.dumps({"prompt": "fox", "top_p": math.nan}).encode()
    response = shared_router.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert_error(response, 400, "invalid_request_error")


@pytest.mark.parametrize("token_id", [-1, 4096, 2**40])
def test_token_ids_that_there_are_none_of_are_not_echoed(router: Router, token_id: int) -> None:
    response = router.complete(prompt=[[5, token_id], [7]], echo=True)
    assert response.status_code == 400
    assert f"the token ID {token_id}" in response.json()["error"]["message"]
