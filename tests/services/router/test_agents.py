"""Requests of agents and gateways: pictures in histories, many tools, other spellings, names, origins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.errors import ConfigurationError
from services.router.openapi.document import OPERATIONS

from .chat_model import USER, Model, call_of
from .conftest import Router, ScriptedTarget, wait_for_health

NewRouter = Callable[..., Router]

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
IMAGE = {
    "chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
}
STAND_IN = "[image left out: this model reads only text]"


def text(api: str, said: str, role: str = "user") -> dict[str, str]:
    kind = "text" if api != "responses" else "input_text" if role == "user" else "output_text"
    return {"type": kind, "text": said}


def answer(api: str, said: str = "a cat") -> dict[str, Any]:
    return {"role": "assistant", "content": [text(api, said, "assistant")]}


def result(api: str, part: object) -> list[dict[str, Any]]:
    """A call and its result, which has `part`."""
    match api:
        case "chat":
            call = {"id": "call_1", "type": "function", "function": {"name": "view", "arguments": "{}"}}
            content = [part, {"type": "text", "text": "seen"}]
            return [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": content},
            ]
        case "responses":
            return [
                {"type": "function_call", "call_id": "call_1", "name": "view", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1", "output": [part, text(api, "seen")]},
            ]
    content = [part, text(api, "seen")]
    return [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "view", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": content}]},
    ]


def send(model: Model, api: str, history: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    field, limit = ("input", "max_output_tokens") if api == "responses" else ("messages", "max_tokens")
    return model.router.client.post(PATHS[api], json={field: history, limit: 4} | fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", PATHS)
class TestWhatCannotBeShown:
    def test_in_history_it_is_a_short_text(self, model: Model, api: str, stream: bool) -> None:
        asked = {"role": "user", "content": [text(api, "what is it?"), IMAGE[api]]}
        response = send(model, api, [asked, answer(api), {"role": "user", "content": "are you sure?"}], stream=stream)
        assert response.status_code == 200, response.text
        assert STAND_IN in model.prompt
        assert "what is it?" in model.prompt
        assert response.headers["x-outrider-warning"]

    def test_in_a_tools_result_too(self, model: Model, api: str, stream: bool) -> None:
        history = [{"role": "user", "content": "look"}, *result(api, IMAGE[api])]
        response = send(model, api, history, stream=stream)
        assert response.status_code == 200, response.text
        assert STAND_IN in model.prompt
        assert "seen" in model.prompt
        assert response.headers["x-outrider-warning"]

    def test_in_a_new_message_it_is_refused(self, model: Model, api: str, stream: bool) -> None:
        asked = {"role": "user", "content": [text(api, "what is it?"), IMAGE[api]]}
        response = send(model, api, [answer(api), asked], stream=stream)
        assert response.status_code == 400
        field = "input" if api == "responses" else "messages"
        assert f"{field}[1].content[1].type: the model reads only text" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio"),
        ({"type": "video_url", "video_url": {"url": "https://example.com"}}, "video"),
        ({"type": "file", "file": {"file_id": "1"}}, "file"),
        ({"type": "anything else"}, "part"),
    ],
)
def test_other_parts_are_named_by_their_kind(model: Model, part: dict[str, Any], word: str) -> None:
    history = [{"role": "user", "content": [part]}, answer("chat"), USER]
    assert send(model, "chat", history).status_code == 200
    assert f"[{word} left out: this model reads only text]" in model.prompt


@pytest.mark.parametrize("is_result", [False, True])
@pytest.mark.parametrize(
    ("block", "shown"),
    [
        (
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "data"}, "title": "T"},
            ["T", "data"],
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "inner"}]}},
            ["inner"],
        ),
        (
            {
                "type": "search_result",
                "source": "https://a.example",
                "title": "T",
                "content": [{"type": "text", "text": "found"}],
            },
            ["T", "https://a.example", "found"],
        ),
    ],
)
def test_documents_with_text_are_read(model: Model, block: dict[str, Any], shown: list[str], is_result: bool) -> None:
    history: list[dict[str, Any]] = [{"role": "user", "content": [block]}]
    if is_result:
        history = [{"role": "user", "content": "look"}, *result("messages", block)]
    response = send(model, "messages", history)
    assert response.status_code == 200, response.text
    assert "\n".join(shown) in model.prompt
    assert "x-outrider-warning" not in response.headers


def tools_of(api: str, names: list[str]) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    match api:
        case "chat":
            return [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]
        case "responses":
            return [{"type": "function", "name": name, "parameters": schema} for name in names]
    return [{"name": name, "input_schema": schema} for name in names]


NAMES = [f"mcp__server-{index}/tool.{'x' * 100}" for index in range(200)]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("api", PATHS)
def test_many_tools_with_long_names_are_taken(new_model: Callable[..., Model], api: str, choice: str) -> None:
    model = new_model(max_model_len=100_000)
    tool_choice: object = choice
    if api == "messages":
        tool_choice = {"type": "any" if choice == "required" else "auto"}
    history = [{"role": "user", "content": "look"}]
    response = send(model, api, history, tools=tools_of(api, NAMES), tool_choice=tool_choice)
    assert response.status_code == 200, response.text
    assert all(name in model.prompt for name in NAMES)


ONE = {"type": "function", "name": "one"}
ALLOWED = [{"type": "function", "function": {"name": "one"}}, {"type": "web_search"}]


@pytest.mark.parametrize(
    ("api", "choice", "offered", "is_forced"),
    [
        ("chat", {"type": "auto"}, ["one", "two"], False),
        ("chat", "any", ["one", "two"], True),
        ("chat", {"type": "any"}, ["one", "two"], True),
        ("chat", {"type": "none"}, [], False),
        ("chat", {"type": "custom", "custom": {"name": "two"}}, ["one", "two"], True),
        ("chat", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ALLOWED}}, ["one"], False),
        ("chat", {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": ALLOWED}}, ["one"], True),
        ("responses", {"type": "allowed_tools", "mode": "auto", "tools": [ONE]}, ["one"], False),
        ("responses", {"type": "allowed_tools", "mode": "required", "tools": [ONE]}, ["one"], True),
        ("responses", {"type": "function", "name": "one"}, ["one", "two"], True),
        ("messages", {"type": "any"}, ["one", "two"], True),
        ("messages", {"type": "tool", "name": "one"}, ["one", "two"], True),
    ],
)  # fmt: skip
def test_choices_of_tools(model: Model, api: str, choice: object, offered: list[str], is_forced: bool) -> None:
    response = send(
        model, api, [{"role": "user", "content": "look"}], tools=tools_of(api, ["one", "two"]), tool_choice=choice
    )
    assert response.status_code == 200, response.text
    assert [name for name in ("one", "two") if f'"{name}"' in model.prompt] == offered
    assert (model.grammar is not None) == is_forced
    assert "two" in offered or "two" not in json.dumps(model.grammar)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": []}}, "the mode"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "one"}]}}, "a type"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "there are no tools"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "three"}}]},
            },
            "'three', which is not among the tools",
        ),
        ({"type": "web_search"}, "should be"),
    ],
)
def test_choices_that_cannot_be_met(model: Model, choice: object, said: str) -> None:
    response = send(model, "chat", [USER], tools=tools_of("chat", ["one", "two"]), tool_choice=choice)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"
    assert said in response.json()["error"]["message"]


def test_tools_that_a_server_runs_are_left_out_of_a_chat(model: Model) -> None:
    custom = {"type": "custom", "custom": {"name": "grep"}}
    tools = [custom, {"type": "web_search"}, *tools_of("chat", ["one"])]
    response = send(model, "chat", [USER], tools=tools)
    assert response.status_code == 200, response.text
    assert '"one"' in model.prompt
    assert "grep" not in model.prompt
    assert "'custom', 'web_search'" in response.headers["x-outrider-warning"]


def test_two_tools_of_one_name_are_named(model: Model) -> None:
    response = send(model, "chat", [USER], tools=tools_of("chat", ["one", "two", "one"]))
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("tools[2].function.name should differ")


def test_warnings_are_one_line_of_ascii(model: Model) -> None:
    response = send(model, "chat", [USER], **{"é\n": 1, "b": 2})
    assert response.status_code == 200, response.text
    assert response.headers["x-outrider-warning"] == r"ignored the unknown fields of a request: 'b', '\xe9\n'"


def test_a_template_in_place_of_the_models(new_router: NewRouter, target: ScriptedTarget, tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("{% for message in messages %}#{{ message.content }}{% endfor %}")
    router = new_router([target.address], chat_template=str(file))
    wait_for_health(router)
    response = router.chat(messages=[USER], max_tokens=4)
    assert response.json()["choices"][0]["message"]["content"].startswith("#")


@pytest.mark.parametrize(
    ("source", "said"), [(None, "cannot be read"), (b"\xff", "cannot be read"), (b"{% for %}", "broken")]
)
def test_a_template_that_an_operator_sets_must_work(
    new_router: NewRouter, target: ScriptedTarget, tmp_path: Path, source: bytes | None, said: str
) -> None:
    file = tmp_path / "other.jinja"
    if source is not None:
        file.write_bytes(source)
    with pytest.raises(ConfigurationError, match=rf"router\.chat_template .*{said}"):
        new_router([target.address], chat_template=str(file))


def test_a_broken_template_refuses_only_chats(new_model: Callable[..., Model]) -> None:
    model = new_model("{% for %}")
    response = send(model, "chat", [USER])
    assert response.status_code == 400
    assert "template is broken" in response.json()["error"]["message"]
    assert model.router.complete(prompt="fox", max_tokens=2).status_code == 200


def test_names_and_aliases(new_router: NewRouter, new_target: Callable[[], ScriptedTarget]) -> None:
    target = new_target()
    target.description.adapters["poet"] = "of poems"
    router = new_router(
        [target.address], served_model_name=["llama", "gpt-4o", "claude=llama", "muse=poet", "typo=lama"]
    )
    wait_for_health(router)
    listed = router.client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["llama", "claude", "gpt-4o", "muse", "poet"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("llama", "poet", False)
    parents = {model["id"]: model["parent"] for model in listed["data"]}
    assert parents == {"llama": None, "claude": None, "gpt-4o": None, "muse": "llama", "poet": "llama"}
    for model in listed["data"]:
        assert model["max_model_len"] == model["context_length"] == 200
        assert (model["type"], model["display_name"]) == ("model", model["id"])
        assert model["created_at"].endswith("+00:00")
    for name, answered in (("llama", "llama"), ("gpt-4o", "llama"), ("claude", "llama"), ("muse", "poet")):
        response = router.complete(model=name, prompt="fox", max_tokens=2)
        assert (response.status_code, response.json()["model"]) == (200, answered)
        assert router.client.get(f"/v1/models/{name}").json()["id"] == name
    assert router.complete(model="gpt-4", prompt="fox").status_code == 404


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("app://obsidian.md", True),
        ("tauri://localhost", True),
        ("chrome-extension://abc", True),
        ("null", False),
        ("https://evil.example", False),
    ],
)
def test_pages_of_any_scheme(new_router: NewRouter, target: ScriptedTarget, origin: str, is_allowed: bool) -> None:
    allowed = ["app://obsidian.md", "tauri://localhost", "chrome-extension://abc"]
    router = new_router([target.address], cors_allow_origins=allowed)
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    preflight = router.client.options("/v1/chat/completions", headers=headers)
    assert (preflight.status_code == 200) == is_allowed
    assert preflight.headers.get("access-control-allow-origin") == (origin if is_allowed else None)
    if is_allowed:
        assert preflight.headers["access-control-allow-private-network"] == "true"
    assert (router.client.post("/v1/completions", headers={"origin": origin}, json={}).status_code == 403) != is_allowed


def test_null_only_where_it_is_listed(new_router: NewRouter, target: ScriptedTarget) -> None:
    router = new_router([target.address], cors_allow_origins=["null"])
    assert (
        router.client.get("/health/live", headers={"origin": "null"}).headers["access-control-allow-origin"] == "null"
    )


def test_prompts_are_counted_under_every_path(model: Model) -> None:
    count = model.router.client.post("/v1/responses/input_tokens", json={"input": "look"})
    assert (
        send(model, "responses", [{"role": "user", "content": "look"}]).json()["usage"]["input_tokens"]
        == (count.json()["input_tokens"])
    )
    assert count.json()["object"] == "response.input_tokens"
    long = {"messages": [USER | {"content": "fox " * 20_000}]}
    assert model.router.client.post("/v1/messages/count_tokens", json=long).json()["input_tokens"] > 20_000
    tokens = [model.router.client.post(path, json={"prompt": "fox"}).json() for path in ("/tokenize", "/v1/tokenize")]
    assert tokens[0] == tokens[1]
    body = {"tokens": tokens[0]["tokens"]}
    assert model.router.client.post("/v1/detokenize", json=body).json() == {"prompt": "fox"}


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"max_tokens": 4.0, "seed": 7.0, "top_k": 5.0, "n": 1.0}),
        ("chat", {"messages": [{"role": "user", "content": ["the", {"type": "input_text", "text": "fox"}]}]}),
        ("responses", {"max_output_tokens": 4.0, "input": [{"role": "user", "content": ["the fox"]}]}),
        ("messages", {"max_tokens": 4.0}),
    ],
)
def test_other_spellings_are_taken(model: Model, api: str, fields: dict[str, Any]) -> None:
    response = send(model, api, [{"role": "user", "content": "the fox"}], **fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("value", [20.5, "20", True, float("1e300")])
def test_other_numbers_are_not(model: Model, value: object) -> None:
    assert send(model, "chat", [USER], max_tokens=value).status_code == 400


def test_a_byte_order_mark_is_passed_over(shared_router: Router) -> None:
    body = b"\xef\xbb\xbf" + json.dumps({"prompt": "fox", "max_tokens": 2}).encode()
    headers = {"content-type": "application/json"}
    assert shared_router.client.post("/v1/completions", content=body, headers=headers).status_code == 200


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
        ("chat", {"response_format": {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}}),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
        ("responses", {"text": {"format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}}),
    ],
)
def test_schemas_are_found_where_clients_write_them(model: Model, api: str, fields: dict[str, Any]) -> None:
    response = send(model, api, [{"role": "user", "content": "look"}], **fields)
    assert response.status_code == 200, response.text
    assert "city" in json.dumps(model.grammar)


def test_every_route_of_the_document_exists(shared_router: Router) -> None:
    for operation in OPERATIONS:
        path = operation.path.replace("{model}", shared_router.model)
        path = path.replace("{", "").replace("}", "")
        response = shared_router.client.request(operation.method, path)
        assert "there is no route" not in response.text, path


@pytest.mark.parametrize("api", PATHS)
class TestHalvesOfCharacters:
    """Clients that cut texts by UTF-16 units, or models, write escapes of lone surrogates."""

    def test_in_a_body_they_are_replaced(self, model: Model, api: str) -> None:
        field, limit = ("input", "max_output_tokens") if api == "responses" else ("messages", "max_tokens")
        body = json.dumps({field: [{"role": "user", "content": "cut \ud83d here \U0001f600"}], limit: 4})
        headers = {"content-type": "application/json"}
        response = model.router.client.post(PATHS[api], content=body.encode(), headers=headers)
        assert response.status_code == 200, response.text
        assert "cut \ufffd here \U0001f600" in model.prompt

    def test_in_the_arguments_of_a_call_they_can_be_sent_back(self, model: Model, api: str) -> None:
        model.will_say(call_of("one", '{"a": "\\ud83d"}'))
        history = [{"role": "user", "content": "look"}]
        fields = {"tools": tools_of(api, ["one"])} | ({} if api == "responses" else {"max_tokens": 90})
        if api == "responses":
            fields["max_output_tokens"] = 90
        answer = send(model, api, history, **fields)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        match api:
            case "chat":
                history.append(body["choices"][0]["message"])
                history.append({"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": "ok"})
            case "responses":
                history += body["output"]
                output = {"type": "function_call_output", "call_id": body["output"][0]["call_id"], "output": "ok"}
                history.append(output)
            case _:
                assert body["content"][0]["input"] == {"a": "\ufffd"}
                history.append({"role": "assistant", "content": body["content"]})
                result = {"type": "tool_result", "tool_use_id": body["content"][0]["id"], "content": "ok"}
                history.append({"role": "user", "content": [result]})
        assert send(model, api, history, **fields).status_code == 200
        assert 'one {"a": "\ufffd"}' in model.prompt


ONE_SYSTEM = """\
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('only the first') }}{% endif %}
    {{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("roles", "prompt"),
    [
        (["system", "system", "user"], "<system>0\n1<user>2"),
        (["user", "assistant", "system", "user"], "<system>2<user>0<assistant>1<user>3"),
        (["system", "user", "system"], "<system>0\n2<user>1"),
    ],
)
def test_a_template_with_one_system_message_gets_one(
    new_model: Callable[..., Model], roles: list[str], prompt: str
) -> None:
    model = new_model(ONE_SYSTEM)
    history = [{"role": role, "content": str(index)} for index, role in enumerate(roles)]
    assert send(model, "chat", history).status_code == 200
    assert model.prompt == prompt


@pytest.mark.parametrize("api", PATHS)
def test_a_refused_picture_does_not_end_the_session(model: Model, api: str) -> None:
    asked = {"role": "user", "content": [text(api, "what is it?"), IMAGE[api]]}
    assert send(model, api, [asked]).status_code == 400
    assert send(model, api, [asked, {"role": "user", "content": "never mind"}]).status_code == 200
    assert STAND_IN in model.prompt


def test_a_picture_beside_a_tools_result_belongs_to_it(model: Model) -> None:
    call, answered = result("messages", text("messages", "seen"))
    answered["content"].append(IMAGE["messages"])
    history = [{"role": "user", "content": "look"}, call, answered]
    assert send(model, "messages", history).status_code == 200
    assert STAND_IN in model.prompt


def test_a_tool_that_was_found_is_named(model: Model) -> None:
    history = [{"role": "user", "content": "look"}, *result("messages", {"type": "tool_reference", "tool_name": "w"})]
    assert send(model, "messages", history).status_code == 200
    assert "The tool w is available." in model.prompt


@pytest.mark.parametrize("arguments", ['""', '"  "', "null", "{}"])
def test_a_call_without_arguments(model: Model, arguments: str) -> None:
    model.will_say(f'<tool_call>\n{{"name": "one", "arguments": {arguments}}}\n</tool_call>')
    response = send(model, "chat", [USER], tools=tools_of("chat", ["one"]), max_tokens=90)
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "one", "arguments": "{}"}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "read", "namespace": "mcp__notes"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "read", "namespace": "mcp__notes"}],
        },
    ],
)
def test_a_choice_names_a_tool_of_a_namespace(model: Model, choice: dict[str, Any]) -> None:
    tools = [{"type": "function", "name": name, "parameters": {}} for name in ("read", "write")]
    namespace = {"type": "namespace", "name": "mcp__notes", "description": "", "tools": tools}
    response = send(model, "responses", [{"role": "user", "content": "look"}], tools=[namespace], tool_choice=choice)
    assert response.status_code == 200, response.text
    assert model.grammar is not None


def test_warnings_are_bounded_after_they_are_escaped(model: Model) -> None:
    response = send(model, "chat", [USER], **{chr(0x1F600) * 60 + str(index): 1 for index in range(5)})
    assert response.status_code == 200, response.text
    assert len(response.headers["x-outrider-warning"]) == 500


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"json_schema": {"name": "a", "schema": {}}}, {}),
        ({"json_schema": {"name": "a"}}, {"type": "object"}),
        ({"schema": None, "json_schema": {"name": "a", "schema": SCHEMA}}, SCHEMA | {"additionalProperties": False}),
    ],
)
def test_an_empty_schema_allows_anything(model: Model, form: dict[str, Any], expected: dict[str, Any]) -> None:
    response = send(model, "chat", [USER], response_format={"type": "json_schema"} | form)
    assert response.status_code == 200, response.text
    assert model.grammar == expected


@pytest.mark.parametrize("schema", [False, [], 5])
def test_what_is_no_schema_is_refused(model: Model, schema: object) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert send(model, "chat", [USER], response_format=form).status_code == 400


@pytest.mark.parametrize("text", [r'{"a": "\\ud8zz"}', r'{"a": "\\ud8"} "}', r'{"a": "\\ud83d'])
def test_only_whole_escapes_are_replaced(shared_router: Router, text: str) -> None:
    headers = {"content-type": "application/json"}
    body = text.replace("\\\\", "\\").encode()
    assert shared_router.client.post("/v1/completions", content=body, headers=headers).status_code == 400


def test_a_tool_is_named_by_its_place_in_the_request(model: Model) -> None:
    tools = [{"type": "web_search"}, *tools_of("chat", ["one"])]
    tools[1]["function"]["parameters"]["properties"]["a"] = {"type": "string", "pattern": "(?=x)"}
    response = send(model, "chat", [USER], tools=tools, tool_choice="required")
    assert response.status_code == 400
    assert "tools[1].function.parameters" in response.json()["error"]["message"]


def test_a_continued_message_stays_at_the_end(new_model: Callable[..., Model]) -> None:
    model = new_model(ONE_SYSTEM)
    history = [{"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}]
    response = send(model, "chat", history, continue_final_message=True, add_generation_prompt=False)
    assert response.status_code == 400


@pytest.mark.parametrize("block", [{"type": 5}, {"type": ["a"]}, {}])
def test_blocks_without_a_type_are_refused_in_results(model: Model, block: dict[str, Any]) -> None:
    history = [{"role": "user", "content": "look"}, *result("messages", block)]
    assert send(model, "messages", history).status_code == 400


@pytest.mark.parametrize(
    ("source", "place"),
    [({"type": "text", "data": 5}, "source.data"), ({"type": "content", "content": []}, "source.content")],
)
def test_a_wrong_document_is_named(model: Model, source: dict[str, Any], place: str) -> None:
    history = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    response = send(model, "messages", history)
    assert response.status_code == 400
    assert f"messages[0].content[0].{place}" in response.json()["error"]["message"]
