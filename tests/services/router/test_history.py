"""Answers go back as history whatever they hold: what chat templates have no place for is text, or left out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from services.router.chat.messages import to_messages

from .chat_model import TIME, USER, Model, call_of

NO_OBJECTS = ['{"title":"Lin', "[]", '"x"', "5", "true", "{'a': 1}", '{"a": NaN}', "[" * 5000]
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
FUNCTION = {"name": "f", "arguments": '{"a": 1}'}
CUSTOM = {"type": "custom", "custom": {"name": "f", "input": "x"}}


def calling(arguments: object) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def arguments_of(message: dict[str, Any]) -> object:
    (call,) = message["tool_calls"]
    return call["function"]["arguments"]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "services.router.errors"]


@pytest.mark.parametrize("arguments", NO_OBJECTS)
def test_arguments_that_are_no_object_are_the_text_of_one(arguments: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, message, _ = to_messages([USER, calling(arguments), RESULT])
    assert arguments_of(message) == {"arguments": arguments}
    (warning,) = warnings_of(caplog)
    assert "messages[1].tool_calls[0].function.arguments" in warning


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("null", {}), ("", {}), (None, {}), ({"a": 1}, {"a": 1}), ('{"a": 1}', {"a": 1}), (" {} ", {})],
)
def test_other_arguments_are_an_object_without_a_warning(
    arguments: object, expected: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _, message = to_messages([USER, calling(arguments)])
    assert arguments_of(message) == expected
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": []}, ""),
        ({"content": None, "tool_calls": [], "annotations": [], "audio": None, "function_call": None}, ""),
        ({"refusal": "No."}, "No."),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": [], "refusal": "No."}, "No."),
        ({"content": "Sorry.", "refusal": "No."}, [{"type": "text", "text": t} for t in ("Sorry.", "No.")]),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, [{"type": "text", "text": "No."}]),
        ({"content": None, "audio": {"id": "audio_1"}}, ""),
        ({"content": None, "audio": {"id": "audio_1", "transcript": "Warm."}}, "Warm."),
    ],
)
@pytest.mark.parametrize("reasoning", [None, "hm"])
def test_an_answer_without_content_is_taken(fields: dict[str, Any], content: object, reasoning: str | None) -> None:
    _, message, _ = to_messages([USER, {"role": "assistant", "reasoning_content": reasoning} | fields, USER])
    assert message["content"] == content
    assert message.get("reasoning") == message.get("reasoning_content") == reasoning


@pytest.mark.parametrize("role", ["tool", "function"])
@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_a_tool_may_return_nothing(role: str, fields: dict[str, Any]) -> None:
    assert to_messages([{"role": role, "name": "f"} | fields]) == [{"role": "tool", "name": "f", "content": ""}]


@pytest.mark.parametrize(
    ("fields", "call"),
    [
        ({"function_call": FUNCTION}, {"name": "f", "arguments": {"a": 1}}),
        ({"tool_calls": [CUSTOM]}, {"name": "f", "arguments": {"input": "x"}}),
        ({"tool_calls": [{"type": None, "id": None, "function": FUNCTION}]}, {"name": "f", "arguments": {"a": 1}}),
    ],
)
def test_calls_of_other_kinds_are_calls_of_functions(fields: dict[str, Any], call: dict[str, Any]) -> None:
    (message,) = to_messages([{"role": "assistant", "content": None} | fields])
    assert message == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def test_a_request_has_one_warning_that_lists_the_places(caplog: pytest.LogCaptureFixture) -> None:
    refused = {"role": "assistant", "refusal": "No."}
    with caplog.at_level(logging.WARNING):
        to_messages([USER, calling("["), refused, *[calling("[]")] * 5])
    (warning,) = warnings_of(caplog)
    assert "'messages[1].tool_calls[0].function.arguments', 'messages[2].refusal'" in warning
    assert warning.endswith(" and 2 more")


def test_a_template_sees_all_of_it(new_model: Callable[..., Model]) -> None:
    """Also a template that goes through the arguments by name, as some do."""
    model = new_model(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}"
        "{% for key, text in c.function.arguments | items %}[{{ key }}={{ text }}]{% endfor %}{% endfor %}{% endfor %}"
    )
    model.will_say("So.")
    model.chat(
        messages=[
            USER,
            calling('{"title":"Lin'),
            RESULT | {"content": None},
            {"role": "assistant", "refusal": "No."},
            USER,
            {"role": "assistant", "content": []},
        ]
    )
    assert model.prompt == '<user>Paris?<assistant>[arguments={"title":"Lin]<tool><assistant>No.<user>Paris?<assistant>'


@pytest.mark.parametrize("max_tokens", range(1, 100, 6))
def test_an_answer_goes_back_wherever_it_was_cut_off(model: Model, max_tokens: int) -> None:
    model.will_say("<think>\nhm\n</think>\n\nSo." + call_of("time", '{"zone": "Lin"}'))
    answer = model.chat(max_tokens=max_tokens)["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": None} for call in answer.get("tool_calls", [])]
    assert model.chat(messages=[USER, answer, *results, USER])["finish_reason"]


@pytest.mark.parametrize("max_output_tokens", range(1, 100, 6))
def test_a_response_goes_back_wherever_it_was_cut_off(model: Model, max_output_tokens: int) -> None:
    model.will_say("<think>\nhm\n</think>\n\nSo." + call_of("time", '{"zone": "Lin"}'))
    tools = [{"type": "function", **TIME["function"]}]

    def respond(items: list[Any], **limit: int) -> list[dict[str, Any]]:
        response = model.router.client.post("/v1/responses", json={"input": items, "tools": tools} | limit)
        assert response.status_code == 200, response.text
        return response.json()["output"]

    output = respond([USER], max_output_tokens=max_output_tokens)
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call_id, "output": None} for call_id in calls]
    assert respond([USER, *output, *results])


@pytest.mark.parametrize("arguments", ['{"title":"Lin', "null", "[]", '"x"', None])
@pytest.mark.parametrize("output", [None, []])
@pytest.mark.parametrize("content", [None, [], [{"type": "refusal", "refusal": "No."}]])
def test_items_of_a_response_are_taken(model: Model, arguments: object, output: object, content: object) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": arguments}
    items = [
        USER,
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": output},
        {"type": "message", "role": "assistant", "content": content},
    ]
    model.will_say("So.")
    response = model.router.client.post("/v1/responses", json={"input": items})
    assert response.status_code == 200, response.text
    assert model.prompt.startswith("<user>Paris?<assistant><tool_call>f {")
    assert model.prompt.endswith("</tool_call><tool>#call_1<assistant>" + ("No." if content else "") + "<assistant>")
