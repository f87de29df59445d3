"""In a chat, stop strings look at the content only: not at reasoning, and not at calls."""

from __future__ import annotations

from typing import Any

import pytest

from .chat_model import WEATHER, Model, call_of, functions_of

CALL = call_of("weather", '{"city": "Paris"}')
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("tokens_per_reply", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "stop", "content", "reasoning", "calls", "finish_reason"),
    [
        (f"<think>so: think</think>{CALL}", ":", None, "so: think", 1, "tool_calls"),
        ("<think>so: think</think>yes: it is", ":", "yes", "so: think", 0, "stop"),
        (f"well: {CALL}", ":", "well", None, 0, "stop"),
        (f"well {CALL}", "Paris", "well", None, 1, "tool_calls"),
        (f"one{CALL}two", "onetwo", "onetwo", None, 1, "tool_calls"),
        ("first\nsecond", "\n", "first", None, 0, "stop"),
        (f"first\n{CALL}", "\n", "first", None, 0, "stop"),
        ("<think>a</think>\n\nb END c", ["END", "c"], "b ", "a", 0, "stop"),
        ("nothing of it", "END", "nothing of it", None, 0, "stop"),
    ],
)
def test_stop_strings_end_content_only(
    model: Model,
    tokens_per_reply: int,
    text: str,
    stop: str | list[str],
    content: str | None,
    reasoning: str | None,
    calls: int,
    finish_reason: str,
) -> None:
    model.target.tokens_per_reply = tokens_per_reply
    model.will_say(text)
    whole = model.chat(stop=stop)
    message = whole["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    assert len(message.get("tool_calls", ())) == calls
    assert whole["finish_reason"] == finish_reason
    model.will_say(text)
    choices = model.stream(stop=stop)
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content") or "" for delta in deltas) == (content or "")
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (reasoning or "")
    streamed = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert sum("name" in function for function in streamed) == calls
    assert choices[-1]["finish_reason"] == finish_reason
    assert choices[-1].get("stop_reason") == whole.get("stop_reason")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_demanded_call_is_not_cut(model: Model, choice: Any) -> None:
    arguments = '{"city": "Paris: the city"}'
    model.will_say(arguments if choice is NAMED else f'[{{"name": "weather", "parameters": {arguments}}}]')
    message = model.chat(tools=[WEATHER], tool_choice=choice, stop=[":"])["message"]
    assert functions_of(message) == [("weather", arguments)]


def test_the_stop_string_is_shown_if_asked_for(model: Model) -> None:
    model.will_say("<think>so: think</think>yes: it is")
    choice = model.chat(stop=":", include_stop_str_in_output=True)
    assert (choice["message"]["content"], choice["stop_reason"]) == ("yes:", ":")


def test_a_minimum_of_tokens_is_free_of_stops(model: Model) -> None:
    model.will_say("a: b: c")
    num_tokens = len(model.tokenizer.encode("a: b"))
    assert model.chat(stop=":", min_tokens=num_tokens)["message"]["content"] == "a: b"


@pytest.mark.parametrize("includes", [True, False])
def test_reasoning_tokens_are_in_the_usage(model: Model, includes: bool) -> None:
    model.will_say("<think>so: think</think>yes")
    fields = {"messages": [{"role": "user", "content": "?"}], "include_reasoning": includes}
    expected = len(model.tokenizer.encode("so: think"))
    usage = model.router.chat(**fields).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}
    *_, last, _ = model.router.stream_chat(**fields, stream_options={"include_usage": True})
    assert last["usage"] == usage
