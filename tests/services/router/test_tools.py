"""Calls of tools and reasoning through real servers: what the model is told, and what becomes of what it writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from services.router.output.tools import NO_PARAMETERS

from .chat_model import ENFORCED, MISTRAL_TEMPLATE, NAMED, TIME, USER, WEATHER, Model, call_of, functions_of


def test_what_the_model_is_told(model: Model) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "18"}]},
    ]
    model.will_say("Warm.")
    choice = model.chat(messages=messages)
    assert choice["message"] == {"role": "assistant", "content": "Warm.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert model.prompt == (
        f"<tools>{json.dumps(WEATHER)}{json.dumps(TIME)} in <tool_call></tool_call></tools>"
        '<user>Paris?<assistant>(hm)<tool_call>weather {"city": "Rome"}</tool_call><tool>18#call_1<assistant>'
    )
    assert model.grammar is None


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}])
def test_without_tools_the_model_is_told_of_none_and_text_is_text(model: Model, fields: dict[str, Any]) -> None:
    text = call_of("time", "{}")
    model.will_say(text)
    choice = model.chat(**fields)
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert model.prompt == "<user>Paris?<assistant>"


@pytest.mark.parametrize("tokens_per_reply", [1, 7, 1000])
def test_calls_whole_and_streamed(model: Model, tokens_per_reply: int) -> None:
    model.target.tokens_per_reply = tokens_per_reply
    model.will_say("I look. " + call_of("weather", '{"city": "Paris"}') + "\n" + call_of("time", "{}"))
    choice = model.chat()
    message = choice["message"]
    assert message["content"] == "I look."
    assert functions_of(message) == [("weather", '{"city": "Paris"}'), ("time", "{}")]
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"

    first, *choices, last = model.stream()
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
    for index, (name, arguments) in enumerate(functions_of(message)):
        begun, *pieces = [call for call in calls if call["index"] == index]
        assert begun["id"].startswith("call_")
        assert (begun["type"], begun["function"]) == ("function", {"name": name, "arguments": ""})
        assert all(call.keys() == {"index", "function"} for call in pieces)
        assert "".join(call["function"]["arguments"] for call in pieces) == arguments
    if tokens_per_reply == 1:
        assert len(calls) > 6


def test_answers_read_for_calls_are_counted(model: Model) -> None:
    for text in (call_of("time", "{}"), "None."):
        model.will_say(text)
        model.chat()
        model.stream()
        model.chat(tools=[])
    page = model.router.client.get("/metrics").text
    counted = [line for line in page.splitlines() if line.startswith("vllm:tool_call_parser_invocations_total{")]
    assert [line.rpartition(" ")[2] for line in counted] == ["1.0"] * 4
    for mode, outcome in itertools.product(("streaming", "non_streaming"), ("tool_call", "no_tool_call")):
        labels = f'mode="{mode}",model_name="{model.router.model}",outcome="{outcome}",request_type="chat_completions"'
        assert any(labels in line for line in counted)


def test_token_ids_of_markup_are_in_the_stream_too(model: Model) -> None:
    model.will_say(call_of("time", "{}"))
    whole = model.chat(return_token_ids=True)
    streamed = [token_id for choice in model.stream(return_token_ids=True) for token_id in choice["token_ids"]]
    assert streamed == whole["token_ids"] == [*(model.target.scripts[0]), 0]


def test_special_tokens_that_mark_calls_are_read_and_others_hidden(new_model: Callable[..., Model]) -> None:
    model = new_model(MISTRAL_TEMPLATE)
    model.will_say('[TOOL_CALLS][{"name": "time", "arguments": {}}]<|end|>')
    choice = model.chat()
    assert functions_of(choice["message"]) == [("time", "{}")]
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9
    model.will_say("No<|end|> call")
    assert model.chat()["message"]["content"] == "No call"
    assert model.chat(skip_special_tokens=False)["message"]["content"] == "No<|end|> call<|endoftext|>"
    assert "".join(choice["delta"].get("content", "") for choice in model.stream()) == "No call"


def test_a_parser_can_be_set(new_model: Callable[..., Model]) -> None:
    model = new_model("{{ messages[0].content }}", tool_call_parser="llama3")
    model.will_say('{"name": "time", "parameters": {}}')
    assert functions_of(model.chat()["message"]) == [("time", "{}")]


def test_or_be_off(new_model: Callable[..., Model]) -> None:
    model = new_model(tool_call_parser="none", reasoning_parser="none")
    text = "<think>hm</think>" + call_of("time", "{}")
    model.will_say(text)
    assert model.chat()["message"]["content"] == text


def test_only_one_call_where_they_may_not_be_parallel(model: Model) -> None:
    model.will_say(call_of("time", "{}") * 2)
    assert functions_of(model.chat(parallel_tool_calls=False)["message"]) == [("time", "{}")]
    assert (
        sum("id" in call for c in model.stream(parallel_tool_calls=False) for call in c["delta"].get("tool_calls", []))
        == 1
    )


def test_an_answer_that_is_cut_off_within_a_call(model: Model) -> None:
    model.will_say(call_of("weather", '{"city": "Paris"}'))
    num_tokens = len(model.tokenizer.encode('<tool_call>\n{"name": "weather", "arguments": {"ci'))
    choice = model.chat(max_tokens=num_tokens)
    assert functions_of(choice["message"]) == [("weather", '{"ci')]
    assert choice["finish_reason"] == "length"


def test_a_named_function_is_what_the_answer_is(model: Model) -> None:
    model.will_say('{"city": "Paris"}')
    choice = model.chat(tool_choice=NAMED)
    assert functions_of(choice["message"]) == [("weather", '{"city": "Paris"}')]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "stop"
    assert model.grammar == ENFORCED


@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_is_required(model: Model, parallel: bool) -> None:
    model.will_say('[{"name": "weather", "parameters": {"city": "Paris"}}]')
    choice = model.chat(tool_choice="required", parallel_tool_calls=parallel)
    assert functions_of(choice["message"]) == [("weather", '{"city": "Paris"}')]
    assert choice["finish_reason"] == "tool_calls"
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": parameters},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, parameters in (("weather", ENFORCED), ("time", NO_PARAMETERS))
    ]
    limit = {} if parallel else {"maxItems": 1}
    assert model.grammar == {"type": "array", "minItems": 1, "items": {"anyOf": calls}} | limit


@pytest.mark.parametrize("thinks", [False, True])
def test_reasoning_whole_and_streamed(model: Model, thinks: bool) -> None:
    model.will_say(("" if thinks else "<think>\n") + "I could ask.\n</think>\n\nSo." + call_of("time", "{}"))
    fields = {"chat_template_kwargs": {"thinks": thinks}}
    message = model.chat(**fields)["message"]
    assert message["reasoning_content"] == message["reasoning"] == "I could ask."
    assert message["content"] == "So."
    assert functions_of(message) == [("time", "{}")]
    deltas = [choice["delta"] for choice in model.stream(**fields)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I could ask."
    assert "".join(delta.get("content", "") for delta in deltas) == "So."
    left_out = model.chat(include_reasoning=False, **fields)["message"]
    assert left_out["content"] == "So."
    assert "reasoning" not in left_out


def test_an_answer_that_goes_on_with_its_reasoning(model: Model) -> None:
    model.will_say(" ask.</think>So.")
    messages = [USER, {"role": "assistant", "content": "<think>I could"}]
    message = model.chat(messages=messages, continue_final_message=True, add_generation_prompt=False)["message"]
    assert (message["reasoning"], message["content"]) == (" ask.", "So.")


def test_the_official_client(model: Model) -> None:
    model.will_say(call_of("weather", '{"city": "Paris"}'))
    client = model.router.openai()
    fields: dict[str, Any] = {"model": "chat-model", "messages": [USER], "tools": [WEATHER]}
    whole = client.chat.completions.create(**fields).choices[0].message
    assert whole.tool_calls is not None
    assert whole.tool_calls[0].function.name == "weather"  # type: ignore[union-attr]
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == '{"city": "Paris"}'

    # The calls and their results go back as they came.
    model.will_say("Warm.")
    history = [USER, whole, {"role": "tool", "tool_call_id": whole.tool_calls[0].id, "content": "18"}]
    answer = client.chat.completions.create(**fields | {"messages": history})
    assert answer.choices[0].message.content == "Warm."
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**fields, tool_choice={"type": "function", "function": {"name": "other"}})
    assert caught.value.param == "tool_choice"


def test_the_tokens_of_a_conversation_with_tools(model: Model) -> None:
    body = {"messages": [USER], "tools": [TIME], "add_generation_prompt": False}
    tokens = model.router.client.post("/tokenize", json=body).json()["tokens"]
    assert model.tokenizer.decode(tokens).endswith("</tools><user>Paris?")
