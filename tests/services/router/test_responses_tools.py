"""Tools of responses: custom tools, tools of other kinds, and a request as the Codex CLI sends it."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest

from services.router.responses.custom_input import CustomInput

from .chat_model import PARAMETERS, Model, call_of
from .test_responses import create, stream, without_ids

SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
GRAMMAR = 'start: "*** Begin Patch" LF'
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
PATCH = '*** Begin Patch\n*** Add File: a.py\n+print("é 🦊\\n")\n*** End Patch'
CODEX: dict[str, Any] = {
    "model": "chat-model",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>none</permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "<environment>/work</environment>"},
                {"type": "input_text", "text": "Write a.py."},
            ],
        },
    ],
    "tools": [
        SHELL,
        APPLY_PATCH,
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "namespace", "name": "mcp__notes", "tools": [{"type": "function", "name": "read"}]},
        {"type": "mcp", "server_label": "notes", "server_url": "https://example.com"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213",
    "text": {"verbosity": "low"},
}
FIRST_SYSTEM_ONLY = (
    "{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('a second system message') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}<assistant>{# <tool_call> </think> #}"
)


def patch_call(patch: str = PATCH) -> str:
    return call_of("apply_patch", json.dumps({"input": patch}))


@pytest.mark.parametrize("tokens_per_reply", [1, 7, 1000])
def test_a_request_of_the_codex_cli(
    new_model: Callable[..., Model], tokens_per_reply: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model(FIRST_SYSTEM_ONLY)
    model.target.tokens_per_reply = tokens_per_reply
    model.will_say("<think>\nhm\n</think>\n\nI write it." + patch_call())
    with caplog.at_level(logging.WARNING):
        events = stream(model, **CODEX)
    assert model.prompt == (
        "shell;apply_patch;mcp__notes.read;<system>You are a coding agent.\n<permissions>none</permissions>"
        "<user><environment>/work</environment>\nWrite a.py.<assistant>"
    )
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "services.router.errors"]
    assert warning == "left out the tools of unsupported types: 'local_shell', 'mcp', 'web_search'"
    assert events[-1]["type"] == "response.completed"
    reasoning, message, call = events[-1]["response"]["output"]
    assert (reasoning["type"], message["content"][0]["text"]) == ("reasoning", "I write it.")
    assert without_ids([call]) == [
        {"type": "custom_tool_call", "status": "completed", "name": "apply_patch", "input": PATCH}
    ]
    assert call["id"].startswith("ctc_")

    of_call = [event for event in events if event.get("output_index") == 2]
    added, *deltas, done, item_done = of_call
    assert added["item"] | {"status": "completed", "input": PATCH} == call == item_done["item"]
    assert {event["type"] for event in deltas} == {"response.custom_tool_call_input.delta"}
    assert "".join(event["delta"] for event in deltas) == PATCH
    assert (done["type"], done["input"]) == ("response.custom_tool_call_input.done", PATCH)
    assert {event["item_id"] for event in (*deltas, done)} == {call["id"]}
    if tokens_per_reply == 1:
        assert len(deltas) > 10

    # What came goes back as it is, with the result of the call.
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    model.will_say("It is there.")
    events = stream(model, **CODEX | {"input": [*CODEX["input"], reasoning, message, call, result]})
    arguments = json.dumps({"input": PATCH}, ensure_ascii=False)
    assert model.prompt.endswith(f"Write a.py.<assistant>I write it.apply_patch{arguments}<tool>Done.<assistant>")
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "It is there."


def test_the_official_client(model: Model) -> None:
    client = model.router.openai()
    model.will_say(patch_call())
    fields: dict[str, Any] = {name: value for name, value in CODEX.items() if name != "stream"}
    with client.responses.stream(**fields) as events:
        text = "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta")
        final = events.get_final_response()
    (call,) = final.output
    assert call.type == "custom_tool_call"
    assert call.input == text == PATCH
    result = {
        "type": "custom_tool_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "5"}],
    }
    model.will_say("So.")
    history = [*fields["input"], *final.output, result]
    assert client.responses.create(**fields | {"input": history}).output_text == "So."
    assert f"<tool>5#{call.call_id}" in model.prompt


def test_the_model_sees_a_function_of_one_text(model: Model) -> None:
    model.will_say("So.")
    create(model, tools=[APPLY_PATCH, {"type": "custom", "name": "note", "format": {"type": "text"}}])
    described = {"type": "string", "description": f"Text in this lark grammar:\n{GRAMMAR}"}
    for name, description, text in [("apply_patch", "Edits files.", described), ("note", None, {"type": "string"})]:
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        function = {"name": name, "description": description, "parameters": parameters}
        shown = {field: value for field, value in function.items() if value is not None}
        assert json.dumps({"type": "function", "function": shown}) in model.prompt


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_call_of_a_custom_tool_can_be_demanded(model: Model, kind: str) -> None:
    model.will_say(json.dumps({"input": PATCH}))
    body = create(model, tools=[APPLY_PATCH], tool_choice={"type": kind, "name": "apply_patch"})
    assert [(item["type"], item["input"]) for item in body["output"]] == [("custom_tool_call", PATCH)]
    assert model.grammar["required"] == ["input"]


def test_an_answer_with_calls_of_functions_and_custom_tools(model: Model) -> None:
    weather = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    model.will_say(patch_call("a") + call_of("weather", '{"city": "Rome"}') + patch_call("b"))
    output = create(model, tools=[APPLY_PATCH, weather])["output"]
    assert [item.get("input", item.get("arguments")) for item in output] == ["a", '{"city": "Rome"}', "b"]
    assert len({item["call_id"] for item in output}) == 3


def test_a_call_that_is_cut_off(model: Model) -> None:
    model.will_say(patch_call())
    num_tokens = len(model.tokenizer.encode(patch_call().partition("Add File")[0]))
    body = create(model, tools=[APPLY_PATCH], max_output_tokens=num_tokens)
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["output"][0]["input"] == "*** Begin Patch\n*** "


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("web_search", {"search_context_size": "low"}),
        ("web_search_preview", {}),
        ("local_shell", {}),
        ("mcp", {"server_label": "x"}),
        ("file_search", {"vector_store_ids": []}),
        ("code_interpreter", {"container": {"type": "auto"}}),
        ("image_generation", {}),
        ("shell", {}),
        ("apply_patch", {}),
        ("tomorrow's", {"anything": [1]}),
    ],
)
def test_tools_of_other_kinds_are_left_out_with_a_warning(
    model: Model, kind: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model.will_say("So.")
    with caplog.at_level(logging.WARNING):
        create(model, tools=[{"type": kind} | fields, SHELL])
    assert model.prompt.count('"name": ') == model.prompt.count('"name": "shell"') == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "services.router.errors"]
    assert kind in warning
    create(model, tools=[{"type": kind} | fields])
    assert model.prompt == "<user>Paris?<assistant>"


def test_items_of_such_tools_are_left_out_with_a_warning(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    model.will_say("So.")
    items = [
        {"role": "user", "content": "Paris?"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "local_shell_call", "call_id": "call_1", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "call_1", "output": "a.py"},
        {"type": "mcp_list_tools", "server_label": "notes", "tools": []},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": "Warm."},
    ]
    with caplog.at_level(logging.WARNING):
        create(model, input=items)
    assert model.prompt == "<user>Paris?<assistant>Warm.<assistant>"
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "services.router.errors"]
    assert "'compaction', 'local_shell_call', 'local_shell_call_output', 'mcp_list_tools', 'web_search_call'" in warning


@pytest.mark.parametrize(
    "fields",
    [
        {"include": ["reasoning.encrypted_content", "web_search_call.action.sources", "file_search_call.results"]},
        {"reasoning": {"summary": "auto"}},
        {"reasoning": {"effort": "high", "summary": "detailed"}},
        {"text": {"verbosity": "low"}},
        {"prompt_cache_key": "x", "store": False, "parallel_tool_calls": False, "tool_choice": "auto"},
    ],
)
def test_what_coding_clients_send_is_taken(
    model: Model, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model.will_say("So.")
    with caplog.at_level(logging.WARNING):
        assert create(model, **fields)["status"] == "completed"
    assert not [record for record in caplog.records if record.name == "services.router.errors"]


def read(arguments: str, cuts: list[int]) -> tuple[str, str]:
    """The text that came with the pieces, and at the end."""
    reader = CustomInput()
    pieces = [arguments[start:end] for start, end in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    return "".join(map(reader.push, pieces)), reader.end()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (json.dumps({"input": PATCH}), PATCH),
        (json.dumps({"input": PATCH}, ensure_ascii=False), PATCH),
        (' {\n "input" :\t"a\\/\\"\\\\" } ', 'a/"\\'),
        ('{"input": ""}', ""),
        ('{"input": "a", "more": "b"}', "a"),
        ('{"input": "a\\ud83e\\udd8ab"}', "a🦊b"),
        ('{"input": "a\\ud83e"}', "a\ufffd"),
        ('{"input": "\\ud83eb\\udd8a\\ud83e\\n\\ud83e\\u0041"}', "\ufffdb\ufffd\ufffd\n\ufffdA"),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\ud83e\\u', "a"),
    ],
)
def test_the_text_of_a_call_comes_as_it_is_written(arguments: str, text: str) -> None:
    random_numbers = random.Random(1)
    for _ in range(50):
        cuts = sorted(random_numbers.choices(range(len(arguments) + 1), k=random_numbers.randint(0, 9)))
        assert read(arguments, cuts) == (text, ""), cuts
    assert read(arguments, list(range(len(arguments)))) == (text, "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"more": 1, "input": "a"}', "a"),
        ("{}", "{}"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"inp', '{"inp'),
        ("", ""),
    ],
)
def test_arguments_of_another_form_are_the_text(arguments: str, text: str) -> None:
    assert read(arguments, list(range(len(arguments)))) == ("", text)


@pytest.mark.parametrize("namespace", ["mcp__notes", "mcp__notes__"])
def test_calls_of_a_namespaces_tools_name_it(model: Model, namespace: str) -> None:
    """In the answer, its stream and the history; the model knows one name."""
    tools = [{"type": "function", "name": "read", "parameters": {}}, {"type": "custom", "name": "grep"}]
    name = "mcp__notes__read" if namespace.endswith("_") else "mcp__notes.read"
    fields = {"tools": [{"type": "namespace", "name": namespace, "description": "", "tools": tools}], "input": "Look."}
    model.will_say(call_of(name, '{"a": 1}') + call_of(name.replace("read", "grep"), '{"input": "x"}'))
    *_, last = stream(model, **fields)
    read, grep = last["response"]["output"]
    assert without_ids([read, grep]) == [
        {
            "type": "function_call",
            "status": "completed",
            "name": "read",
            "namespace": namespace,
            "arguments": '{"a": 1}',
        },
        {"type": "custom_tool_call", "status": "completed", "name": "grep", "namespace": namespace, "input": "x"},
    ]
    assert f'"{name}"' in model.prompt
    output = {"type": "function_call_output", "call_id": read["call_id"], "output": "seen"}
    stream(model, **fields | {"input": [{"role": "user", "content": "Look."}, read, output]})
    assert f"<tool_call>{name} " in model.prompt
