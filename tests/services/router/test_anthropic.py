"""POST /v1/messages, whole and streamed, /v1/messages/count_tokens, and their errors, through real servers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.router.http import streaming

from .chat_model import PARAMETERS, USER, Model, call_of
from .conftest import Router, ScriptedTarget
from .test_history import warnings_of

PATH = "/v1/messages"
WEATHER = {"name": "weather", "description": "Of a city", "input_schema": PARAMETERS}
CHAT_WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS},
}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "18"}
CALL = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
VARIABLES = "{% for m in messages %}{{ m.content }}{% endfor %}|{{ enable_thinking }}|{{ more }}{# </think> #}"


def post(model: Model | Router, path: str = PATH, /, **fields: Any) -> httpx.Response:
    router = model.router if isinstance(model, Model) else model
    return router.client.post(path, json={"messages": [USER], "max_tokens": 500} | fields)


def create(model: Model, /, **fields: Any) -> dict[str, Any]:
    response = post(model, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def stream(model: Model, /, **fields: Any) -> list[dict[str, Any]]:
    response = post(model, stream=True, **fields)
    assert response.status_code == 200, response.text
    return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    *events, rest = text.split("\n\n")
    assert rest == ""
    decoded = []
    for event in events:
        if event == ": keep-alive":
            continue
        name, data = event.split("\n")
        decoded.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {decoded[-1]['type']}"
    return decoded


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that `events` report."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message = events[0]["message"]
    texts: dict[int, str] = {}
    names = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    is_open = False
    for event in events[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert (is_open, event["index"]) == (False, len(message["content"]))
                message["content"].append(event["content_block"])
                is_open, texts[event["index"]] = True, ""
            case "content_block_delta":
                assert is_open
                delta = event["delta"]
                if delta["type"] == "signature_delta":
                    message["content"][-1]["signature"] = delta["signature"]
                else:
                    texts[event["index"]] += delta[names[delta["type"]]]
            case "content_block_stop":
                assert is_open
                is_open = False
    assert not is_open
    for index, block in enumerate(message["content"]):
        match block["type"]:
            case "tool_use":
                block["input"] = json.loads(texts[index] or "{}")
            case kind:
                block[kind] = texts[index]
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": content}


def assert_error(response: httpx.Response, status: int, kind: str, text: str = "") -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["error"].keys() == {"type", "message"}
    assert 0 < len(body["error"]["message"]) <= 500
    assert text in body["error"]["message"]
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


def test_a_whole_message(model: Model) -> None:
    model.will_say("Warm.")
    model.target.num_cached_tokens = 5
    response = post(model, system="Be brief.", temperature=0.5, seed=7, metadata={"user_id": "x"})
    body = response.json()
    assert body["id"] == f"msg_{response.headers['request-id']}"
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "chat-model")
    assert body["content"] == [{"type": "text", "text": "Warm."}]
    assert (body["stop_reason"], body["stop_sequence"], body["seed"]) == ("end_turn", None, 7)
    assert response.headers["x-outrider-seed"] == "7"
    (request,) = model.target.requests
    assert body["usage"] == {
        "input_tokens": len(request.prompt_token_ids) - 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 5,
        "output_tokens": len(model.target.scripts[0]) + 1,
    }
    assert model.prompt == "<system>Be brief.<user>Paris?<assistant>"


CONVERSATIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (
        {
            "system": [
                {"type": "text", "text": t, "cache_control": {"type": "ephemeral"}} for t in ("Be brief.", "Now.")
            ]
        },
        {"messages": [{"role": "system", "content": "Be brief.\nNow."}, USER]},
    ),
    (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "I look."},
                        USE | {"cache_control": {"type": "ephemeral"}, "caller": {"type": "direct"}},
                    ],
                },
                {"role": "user", "content": [RESULT, {"type": "text", "text": "And?"}]},
            ],
            "tools": [WEATHER | {"type": "custom", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "toolu_1", "content": "18"},
                {"role": "user", "content": "And?"},
            ],
            "tools": [CHAT_WEATHER],
        },
    ),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": [CHAT_WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}},
        {"tools": [CHAT_WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"tools": [CHAT_WEATHER], "tool_choice": "none"},
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": "It is"}]},
        {
            "messages": [USER, {"role": "assistant", "content": "It is"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}},
    ),
    (
        {
            "top_k": 7,
            "top_p": 0.5,
            "stop_sequences": ["x"],
            "num_speculative_tokens": 2,
            "min_tokens": 3,
            "priority": 1,
        },
        {"top_k": 7, "top_p": 0.5, "stop": ["x"], "num_speculative_tokens": 2, "min_tokens": 3, "priority": 1},
    ),
    ({"allowed_token_ids": [70, 71], "vllm_xargs": {"num_speculative_tokens": 1}},) * 2,
]


@pytest.mark.parametrize(("fields", "chat"), CONVERSATIONS)
def test_a_target_is_asked_what_the_chat_asks(model: Model, fields: dict[str, Any], chat: dict[str, Any]) -> None:
    """Equal requests have equal answers, token for token."""
    model.will_say("Warm.")
    seed_and_limit = {"seed": 5, "max_tokens": 9, "temperature": 0.7}
    create(model, **seed_and_limit | fields)
    response = model.router.chat(**{"messages": [USER]} | seed_and_limit | chat)
    assert response.status_code == 200, response.text
    own, others = model.target.requests
    assert own.request_id != others.request_id
    own.request_id = others.request_id = ""
    assert own == others


@pytest.mark.parametrize("tokens_per_reply", [1, 7, 1000])
def test_events_report_what_the_whole_message_has(model: Model, tokens_per_reply: int) -> None:
    model.target.tokens_per_reply = tokens_per_reply
    model.target.num_cached_tokens = 3
    model.will_say(
        "<think>\nhm\n</think>\n\nI look. é🦊" + call_of("weather", '{"city": "Paris"}') + call_of("time", "{}")
    )
    whole = create(model, tools=[WEATHER, {"name": "time", "input_schema": {"type": "object"}}], seed=1)
    events = stream(model, tools=[WEATHER, {"name": "time", "input_schema": {"type": "object"}}], seed=1)
    assert without_ids(whole)["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
        {"type": "text", "text": "I look. é🦊"},
        {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "name": "time", "input": {}},
    ]
    assert whole["stop_reason"] == "tool_use"
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"] == whole["usage"] | {"output_tokens": 0}
    assert without_ids(accumulated(events)) == without_ids(whole)


def test_stop_reasons(model: Model) -> None:
    model.will_say("the quick brown fox")
    cases: list[tuple[dict[str, Any], str, str | None]] = [
        ({}, "end_turn", None),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["lazy", "brown"]}, "stop_sequence", "brown"),
        ({"stop_token_ids": [model.target.scripts[0][1]]}, "end_turn", None),
    ]
    for fields, reason, sequence in cases:
        body = create(model, **fields)
        assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
        delta = stream(model, **fields)[-2]["delta"]
        assert delta == {"stop_reason": reason, "stop_sequence": sequence}
    assert create(model, stop_sequences=["brown"])["content"] == [{"type": "text", "text": "the quick "}]


def test_a_demanded_call_is_a_tool_use(model: Model) -> None:
    model.will_say('{"city": "Paris"}')
    body = create(model, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    assert without_ids(body)["content"] == [{"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}]
    assert body["stop_reason"] == "tool_use"
    assert model.grammar == PARAMETERS | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1, "b": [1, 2', {"a": 1, "b": [1, 2]}),
        ('{"a": 1e999}', {"arguments": '{"a": 1e999}'}),
        (r'{"a": "\ud800"}', {"a": "\ufffd"}),
    ],
)
def test_arguments_that_clients_cannot_read(model: Model, arguments: str, expected: dict[str, Any]) -> None:
    call = call_of("weather", arguments)
    model.will_say(call if arguments.endswith("}") else call[: call.index(arguments) + len(arguments)])
    (block,) = create(model, tools=[WEATHER])["content"]
    assert block["input"] == expected
    deltas = [
        event["delta"]["partial_json"]
        for event in stream(model, tools=[WEATHER])
        if "delta" in event and "partial_json" in event["delta"]
    ]
    assert "".join(deltas) == arguments


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": "18"}, "18"),
        ({"content": [{"type": "text", "text": "1"}, {"type": "text", "text": "8"}]}, "1\n8"),
        (
            {"content": [{"type": "tool_reference", "tool_name": "x"}, {"type": "text", "text": "18"}]},
            "The tool x is available.\n18",
        ),
        ({}, ""),
        ({"content": None}, ""),
        ({"content": []}, ""),
        ({"content": "no such city", "is_error": True}, "no such city"),
        ({"is_error": True}, "Error"),
        ({"content": [], "is_error": True}, "Error"),
    ],
)
def test_results_of_tools(model: Model, result: dict[str, Any], text: str) -> None:
    model.will_say("Warm.")
    block = {"type": "tool_result", "tool_use_id": "toolu_1"} | result
    create(model, messages=[USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [block]}])
    assert model.prompt == (
        f'<user>Paris?<assistant><tool_call>weather {{"city": "Rome"}}</tool_call><tool>{text}#toolu_1<assistant>'
    )


def test_consecutive_messages_of_one_role_are_one_turn(model: Model) -> None:
    model.will_say("Warm.")
    say = {"role": "assistant", "content": "So."}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Go"}, {"type": "text", "text": "on."}]}
    create(model, system="a", messages=[{"role": "system", "content": "b"}, USER, USER, say, parts, USER])
    assert model.prompt == "<system>a\nb<user>Paris?\nParis?<assistant>So.\nGo\non.<user>Paris?<assistant>"


@pytest.mark.parametrize("last", [[], [{"type": "thinking", "thinking": "hm", "signature": ""}], "", [USE]])
def test_a_turn_of_the_assistant_without_text_is_not_continued(model: Model, last: object) -> None:
    model.will_say("Warm.")
    create(model, messages=[USER, {"role": "assistant", "content": last}])
    assert model.prompt.endswith("<assistant>")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "|"),
        ({"thinking": None}, "|"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True|"),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, "True|"),
        ({"thinking": {"type": "disabled"}}, "False|"),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, "False|"),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False, "more": "x"}}, "False|x"),
    ],
)
def test_thinking_is_a_variable_of_the_template(
    new_model: Callable[..., Model], fields: dict[str, Any], shown: str
) -> None:
    model = new_model(VARIABLES)
    model.will_say("So.")
    create(model, **fields)
    assert model.prompt == f"Paris?|{shown}"
    counted = post(model, f"{PATH}/count_tokens", **fields).json()
    assert counted == {"input_tokens": len(model.target.requests[-1].prompt_token_ids)}


@pytest.mark.parametrize("fields", [conversation for conversation, _ in CONVERSATIONS])
def test_tokens_are_counted_as_they_are_used(model: Model, fields: dict[str, Any]) -> None:
    model.will_say("Warm.")
    body = {"messages": [USER]} | fields
    response = model.router.client.post(f"{PATH}/count_tokens?beta=true", json=body)
    assert response.json() == {"input_tokens": create(model, **fields)["usage"]["input_tokens"]}


def test_what_is_ignored_and_what_is_left_out(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    model.will_say("Warm.")
    with caplog.at_level(logging.WARNING):
        create(
            model,
            metadata={"user_id": "x"},
            service_tier="auto",
            cache_control={"type": "ephemeral"},
            tools=[WEATHER],
        )
    assert warnings_of(caplog) == []
    server_use = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
    with caplog.at_level(logging.WARNING):
        create(
            model,
            betas=["x"],
            context_management={"edits": []},
            output_config={"effort": "high"},
            tools=[{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}],
            messages=[USER, {"role": "assistant", "content": [server_use, {"type": "text", "text": "So."}]}, USER],
        )
    assert warnings_of(caplog) == [
        "ignored the unknown fields of a request: 'betas', 'context_management'",
        "left out the content blocks of unsupported types: 'server_tool_use'",
        "left out the tools of unsupported types: 'bash_20250124', 'web_search_20250305'",
        "ignored the unknown fields of output_config: 'effort'",
    ]
    assert model.prompt == "<user>Paris?<assistant>So.<user>Paris?<assistant>"


BAD_FIELDS: list[tuple[str, list[Any]]] = [
    ("messages", [None, 5, [], [5], [{"role": "user"}], [{"role": "wizard", "content": "x"}], [USER | {"content": 5}]]),
    ("messages", [[USER | {"content": [block]}] for block in (5, {}, {"type": 5}, {"type": "text"}, USE, IMAGE)]),
    ("messages", [[USER | {"content": [{"type": kind}]}] for kind in ("document", "search_result", "thinking")]),
    (
        "messages",
        [[USER | {"content": [RESULT | bad]}] for bad in ({"tool_use_id": 5}, {"content": 5}, {"content": [{}]})],
    ),
    (
        "messages",
        [[{"role": "assistant", "content": [USE | bad]}] for bad in ({"id": 5}, {"name": None}, {"input": "x"})],
    ),
    ("messages", [[{"role": "assistant", "content": [block]}] for block in (RESULT, {"type": "thinking"}, 5)]),
    ("messages", [[USER] * 4097, [USER | {"content": [{"type": "text", "text": ""}] * 1025}]]),
    ("system", [5, [5], [IMAGE]]),
    ("max_tokens", [None, 0, "5", True, 10**9]),
    ("temperature", [3, "0.5"]),
    ("stop_sequences", ["x", [5], [""], ["x"] * 17]),
    (
        "tools",
        [5, [5], [{"type": 5}], [{}], [WEATHER | {"name": "a b"}], [WEATHER, WEATHER], [WEATHER | {"description": 5}]],
    ),
    ("tool_choice", ["auto", {}, {"type": 5}, {"type": "any"}, {"type": "tool"}, {"type": "tool", "name": "x"}]),
    ("tool_choice", [{"type": "auto", "disable_parallel_tool_use": 5}]),
    ("thinking", [5, {"type": "loud"}, {"type": 5}, {"budget_tokens": 5}]),
    ("output_config", [5, {"format": 5}, {"format": {"type": "text"}}]),
    ("num_speculative_tokens", [-1]),
    ("model", [5]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD_FIELDS for value in values])
def test_a_bad_value_is_400_naming_the_field(shared_router: Router, field: str, value: object) -> None:
    response = post(shared_router, **{"max_tokens": 5, field: value})
    # A list of thousands is more than the body of this router may be.
    if response.status_code == 413:
        assert_error(response, 413, "request_too_large")
    else:
        assert_error(response, 400, "invalid_request_error", field)


def test_names_in_messages_are_those_of_this_api(shared_router: Router) -> None:
    schema = post(shared_router, max_tokens=5, tools=[WEATHER | {"input_schema": 5}])
    assert_error(schema, 400, "invalid_request_error", "tools[0].input_schema should be")
    name = post(shared_router, max_tokens=5, tools=[WEATHER | {"name": ""}])
    assert_error(name, 400, "invalid_request_error", "tools[0].name should be")
    image = post(
        shared_router, max_tokens=5, messages=[USER, USER | {"content": [{"type": "text", "text": "x"}, IMAGE]}]
    )
    assert_error(image, 400, "invalid_request_error", "messages[1].content[1].type: the model reads only text")
    form = {"type": "json_schema", "schema": {"type": "number", "multipleOf": 3}}
    multiple = post(shared_router, max_tokens=5, output_config={"format": form})
    assert_error(multiple, 400, "invalid_request_error", "output_config.format.schema.multipleOf cannot be enforced")


def test_agents_can_read_how_long_the_context_is(model: Model) -> None:
    prompt = post(model, f"{PATH}/count_tokens").json()["input_tokens"]
    for fields in ({}, {"stream": True}):
        text = f"input length and `max_tokens` exceed context limit: {prompt} + 32000 > 2000, decrease"
        assert_error(post(model, max_tokens=32_000, **fields), 400, "invalid_request_error", text)
    long: Any = [{"role": "user", "content": "é" * 2000}]
    prompt = post(model, f"{PATH}/count_tokens", messages=long).json()["input_tokens"]
    text = f"prompt is too long: {prompt} tokens > 2000 maximum"
    assert_error(post(model, max_tokens=1, messages=long), 400, "invalid_request_error", text)


def test_errors_of_every_layer_have_the_envelope(
    new_router: Callable[..., Router], target: ScriptedTarget, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:sk-alice-0123456789abcdef\n")
    settings: dict[str, Any] = {"requests_per_minute_per_key": 8, "max_body_bytes": 1000}
    router = new_router([target.address], api_keys_file=str(keys), **settings)
    client, body = router.client, {"messages": [USER], "max_tokens": 5}
    refused = client.post(PATH, json=body)
    assert_error(refused, 401, "authentication_error", "x-api-key")
    assert refused.headers["www-authenticate"] == "Bearer"
    client.headers["x-api-key"] = "sk-alice-0123456789abcdef"
    assert client.post(f"{PATH}?beta=true", json=body, headers={"anthropic-version": "x"}).status_code == 200
    assert_error(client.post(PATH, json=body | {"model": "x"}), 404, "not_found_error", "'x' does not exist")
    assert_error(client.get(f"{PATH}/batches"), 404, "not_found_error", "no route")
    assert_error(client.get(PATH), 405, "invalid_request_error", "method")
    assert_error(client.post(PATH, content=b"{}"), 415, "invalid_request_error", "application/json")
    assert_error(client.post(PATH, json=body | {"x": "y" * 1000}), 413, "request_too_large", "1000 bytes")
    assert_error(
        client.post(PATH, content=b"{", headers={"content-type": "application/json"}), 400, "invalid_request_error"
    )
    assert_error(client.post(f"{PATH}/count_tokens", json={}), 400, "invalid_request_error", "messages is required")
    limited = client.post(PATH, json=body)
    assert_error(limited, 429, "rate_limit_error", "slow down")
    assert int(limited.headers["retry-after"]) > 0


def test_overload_and_absence(
    new_router: Callable[..., Router], target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("services.router.http.middleware._MAX_BODIES_BYTES", 1)
        full = new_router([target.address], max_body_bytes=200_000)
    response = post(full, system="x" * 100_000)
    assert_error(response, 503, "overloaded_error")
    assert response.headers["retry-after"]
    none = new_router(["127.0.0.1:1"])
    assert_error(post(none, max_tokens=5), 503, "api_error")


def test_a_failure_on_the_way_is_an_error_event(model: Model) -> None:
    model.will_say("the quick brown fox")
    model.target.fail_after = 2
    model.target.failure = (grpc.StatusCode.INTERNAL, "secret")
    last = stream(model)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "worker failed" in last["error"]["message"]
    model.target.fail_after = 0
    model.target.failure = (grpc.StatusCode.INVALID_ARGUMENT, "the prompt is unusable")
    assert_error(post(model, stream=True), 400, "invalid_request_error", "the prompt is unusable")


def test_a_silent_stream_has_comments(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "FIRST_COMMENT_S", 0.1)
    model.will_say("So.")
    model.target.delay_s = 0.3
    response = post(model, stream=True, max_tokens=2)
    assert response.text.startswith(": keep-alive\n\n")
    assert accumulated(events_of(response.text))["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("has_page", [True, False])
def test_a_probe_of_the_root_is_answered(
    new_router: Callable[..., Router], target: ScriptedTarget, tmp_path: Path, has_page: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:sk-alice-0123456789abcdef\n")
    router = new_router([target.address], api_keys_file=str(keys), page=has_page)
    response = router.client.head("/")
    assert (response.status_code, response.content) == (200, b"")
    assert router.client.get("/").status_code == (200 if has_page else 404)
