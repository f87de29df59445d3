"""POST /v1/responses, whole and streamed, through real servers and the official client."""

from __future__ import annotations

import json
from typing import Any

import grpc
import openai
import pytest

from .chat_model import ENFORCED, PARAMETERS, Model, call_of
from .test_request_validation import assert_error

WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}', "id": "fc_1"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "18"}


def create(model: Model, /, **fields: Any) -> dict[str, Any]:
    response = model.router.client.post("/v1/responses", json={"input": "Paris?"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def stream(model: Model, /, **fields: Any) -> list[dict[str, Any]]:
    response = model.router.client.post("/v1/responses", json={"input": "Paris?", "stream": True} | fields)
    assert response.status_code == 200, response.text
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    decoded = []
    for event in events:
        name, data = event.split("\n")
        decoded.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {decoded[-1]['type']}"
    assert [event["sequence_number"] for event in decoded] == list(range(len(decoded)))
    return decoded


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_a_whole_response(model: Model) -> None:
    model.will_say("Warm.")
    body = create(model, instructions="Be brief.", temperature=0.5, seed=7, metadata={"a": "b"}, store=True)
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    (item,) = body["output"]
    assert item["id"].startswith("msg_")
    assert item["content"] == [{"type": "output_text", "text": "Warm.", "annotations": [], "logprobs": []}]
    assert (item["role"], item["status"]) == ("assistant", "completed")
    assert (body["store"], body["metadata"], body["instructions"]) == (False, {"a": "b"}, "Be brief.")
    assert (body["temperature"], body["seed"], body["model"]) == (0.5, 7, "chat-model")
    num_tokens = len(model.target.scripts[0]) + 1
    assert body["usage"]["output_tokens"] == num_tokens
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + num_tokens
    assert model.prompt == "<system>Be brief.<user>Paris?<assistant>"


def test_items_become_messages(model: Model) -> None:
    model.will_say("Warm.")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        CALL,
        RESULT,
        {"type": "message", "role": "user", "content": "And?"},
    ]
    create(model, input=items)
    assert model.prompt == (
        '<user>Rome?<assistant>I look.(hm)<tool_call>weather {"city": "Rome"}</tool_call><tool>18#call_1'
        "<user>And?<assistant>"
    )


@pytest.mark.parametrize("tokens_per_reply", [1, 1000])
def test_events_tell_what_the_whole_response_says(model: Model, tokens_per_reply: int) -> None:
    model.target.tokens_per_reply = tokens_per_reply
    model.will_say(
        "<think>\nhm\n</think>\n\nI look. " + call_of("weather", '{"city": "Paris"}') + call_of("time", "{}")
    )
    whole = create(model, tools=[WEATHER], seed=1)
    events = stream(model, tools=[WEATHER], seed=1)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][2]["arguments"] == '{"city": "Paris"}'
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len(model.tokenizer.encode("hm"))

    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["type"] == "response.completed"
    final = events[-1]["response"]
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"] == whole["usage"]
    for index, item in enumerate(final["output"]):
        of_item = [event for event in events if event.get("output_index") == index]
        assert of_item[0]["type"] == "response.output_item.added"
        assert of_item[0]["item"]["status"] == "in_progress"
        assert of_item[-1] | {"item": item} == of_item[-1]
        assert of_item[-1]["type"] == "response.output_item.done"
        text = "".join(event["delta"] for event in of_item if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert {event.get("item_id", item["id"]) for event in of_item} == {item["id"]}


def test_a_response_that_is_cut_off(model: Model) -> None:
    model.will_say("the quick brown fox")
    body = create(model, max_output_tokens=2)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert stream(model, max_output_tokens=2)[-1]["type"] == "response.incomplete"


def test_a_call_can_be_demanded(model: Model) -> None:
    model.will_say('{"city": "Paris"}')
    body = create(model, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    assert [(item["name"], item["arguments"]) for item in body["output"]] == [("weather", '{"city": "Paris"}')]
    assert body["tools"] == [WEATHER]
    assert model.grammar == ENFORCED


def test_a_failure_on_the_way(model: Model) -> None:
    model.will_say("the quick brown fox")
    model.target.fail_after = 2
    model.target.failure = (grpc.StatusCode.INTERNAL, "secret")
    events = stream(model)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert "worker failed" in events[-1]["response"]["error"]["message"]


def test_the_oldest_messages_are_left_out_where_that_is_asked_for(model: Model) -> None:
    model.will_say("Warm.")
    long = [{"role": "user", "content": "fox " * 60}, {"role": "assistant", "content": "dog " * 60}]
    items = [
        {"role": "system", "content": "Be brief."},
        *long * 20,
        CALL,
        RESULT,
        {"role": "user", "content": "Paris?"},
    ]
    assert_error(
        model.router.client.post("/v1/responses", json={"input": items}), 400, "invalid_request_error", "input"
    )
    create(model, input=items, truncation="auto", max_output_tokens=100)
    assert model.prompt.startswith("<system>Be brief.<user>fox fox")
    assert model.prompt.endswith("<user>Paris?<assistant>")
    assert 1500 < len(model.target.requests[-1].prompt_token_ids) <= 1900
    only = [{"role": "user", "content": "fox " * 3000}]
    refused = model.router.client.post("/v1/responses", json={"input": only, "truncation": "auto"})
    assert_error(refused, 400, "invalid_request_error", "input")


BAD_FIELDS = [
    ("input", [None, 5, [], [5], [{"role": "user"}], [{"role": "wizard", "content": "x"}], [{"type": "image"}]]),
    ("input", [[{"role": "user", "content": [{"type": "input_image"}]}], [{"type": "item_reference", "id": "x"}]]),
    (
        "input",
        [[CALL | {"arguments": 5}], [CALL | {"name": 5}], [RESULT | {"call_id": None}], [RESULT | {"output": 5}]],
    ),
    ("instructions", [5]),
    ("max_output_tokens", [0, "5", 10**9]),
    ("temperature", [3]),
    ("tools", [5, [5], [{"type": 5}], [{}], [WEATHER | {"name": ""}], [{"type": "custom"}], [WEATHER, WEATHER]]),
    ("tools", [[{"type": "custom", "name": "weather"}, WEATHER], [{"type": "custom", "name": "f", "description": 5}]]),
    ("tool_choice", ["required", {"type": "function", "name": "x"}, {"type": "allowed_tools"}, {"type": "web_search"}]),
    ("input", [[{"type": "custom_tool_call", "call_id": "x", "name": "f", "input": 5}], [{"type": 5}]]),
    ("text", [5, {"format": 5}]),
    ("reasoning", [5, {"effort": 5}]),
    ("truncation", ["maybe"]),
    ("previous_response_id", ["resp_1"]),
    ("conversation", ["c"]),
    ("background", [True]),
    ("include", [["message.output_text.logprobs"], 5]),
    ("metadata", [{"a": 5}]),
    ("model", [5]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD_FIELDS for value in values])
def test_a_bad_value_is_400_naming_the_field(shared_router, field: str, value: object) -> None:
    response = shared_router.client.post("/v1/responses", json={"input": "fox"} | {field: value})
    assert_error(response, 400, "invalid_request_error", field)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
)
def test_no_response_is_there_later(shared_router, method: str, path: str) -> None:
    response = shared_router.client.request(method, f"/v1/responses/resp_1{path}")
    assert "stores no responses" in assert_error(response, 404, "not_found_error")["message"]


def test_the_official_client(model: Model) -> None:
    client = model.router.openai()
    model.will_say("<think>hm</think>Warm.")
    whole = client.responses.create(model="chat-model", input="Paris?", instructions="Be brief.")
    assert whole.output_text == "Warm."
    assert whole.usage is not None

    model.will_say("<think>hm</think>" + call_of("weather", '{"city": "Paris"}'))
    fields: dict[str, Any] = {"model": "chat-model", "tools": [WEATHER]}
    history: list[Any] = [{"role": "user", "content": "Paris?"}]
    with client.responses.stream(input=history, **fields) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    assert {"response.function_call_arguments.delta", "response.reasoning_text.delta"} <= kinds
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("weather", '{"city": "Paris"}')

    # What came goes back as it is.
    history += final.output
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "18"})
    model.will_say("Warm.")
    assert client.responses.create(input=history, **fields).output_text == "Warm."
    assert "(hm)" in model.prompt
    texts = [
        event.delta for event in client.responses.create(input="x", stream=True, **fields) if "text.delta" in event.type
    ]
    assert "".join(texts) == "Warm."
    with pytest.raises(openai.BadRequestError, match="stores nothing"):
        client.responses.create(input="x", previous_response_id="resp_1", **fields)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
