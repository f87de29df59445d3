"""The official Anthropic client, unmodified, against a router."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import grpc
import pytest

from .chat_model import PARAMETERS, Model, call_of
from .conftest import Router, ScriptedTarget

USER: Any = {"role": "user", "content": "Paris?"}
FIELDS: dict[str, Any] = {"model": "chat-model", "max_tokens": 500}
WEATHER: Any = {"name": "weather", "description": "Of a city", "input_schema": PARAMETERS}
THOUGHT = "<think>\nhm\n</think>\n\n"


def client_of(router: Router, **settings: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=router.url, **{"api_key": "none", "max_retries": 0} | settings)


@pytest.fixture
def client(model: Model) -> anthropic.Anthropic:
    return client_of(model.router)


def comparable(message: Any) -> dict[str, Any]:
    """Returns the fields that are the same in each answer to one request."""
    found: dict[str, Any] = message.to_dict(exclude_none=True)
    for block in (found, *found["content"]):
        block.pop("id", None)
    return found


@pytest.mark.parametrize("tokens_per_reply", [1, 1000])
@pytest.mark.parametrize(
    "answer",
    [
        "Warm.",
        "",
        THOUGHT + "Warm.",
        THOUGHT + "I look." + call_of("weather", '{"city": "Paris", "days": [1, 2]}') + call_of("weather", "{}"),
    ],
)
def test_an_accumulated_stream_is_the_whole_message(
    model: Model, client: anthropic.Anthropic, answer: str, tokens_per_reply: int
) -> None:
    model.target.tokens_per_reply = tokens_per_reply
    model.target.num_cached_tokens = 4
    model.will_say(answer)
    fields = FIELDS | {"messages": [USER], "tools": [WEATHER], "extra_body": {"seed": 3}}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    assert comparable(final) == comparable(whole)
    assert kinds[-1] == "message_stop"
    assert whole.usage.cache_read_input_tokens == 4
    assert whole._request_id
    assert next(event.type for event in client.messages.create(stream=True, **fields)) == "message_start"


@pytest.mark.parametrize("max_tokens", range(1, 60, 7))
def test_a_stream_that_is_cut_off_is_the_whole_message(
    model: Model, client: anthropic.Anthropic, max_tokens: int
) -> None:
    model.will_say("I look." + call_of("weather", '{"city": "Paris", "more": {"days": [1, 2], "x": true}}'))
    fields = FIELDS | {"messages": [USER], "tools": [WEATHER], "max_tokens": max_tokens, "extra_body": {"seed": 3}}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as events:
        assert comparable(events.get_final_message()) == comparable(whole)
    assert whole.stop_reason == "max_tokens"
    results = [
        {"type": "tool_result", "tool_use_id": block.id} for block in whole.content if block.type == "tool_use"
    ] or [{"type": "text", "text": "Go on."}]
    again = [USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    assert client.messages.create(**fields | {"messages": again}).content


def test_tools_and_thinking_round_trip(model: Model, client: anthropic.Anthropic) -> None:
    model.will_say(THOUGHT + "I look." + call_of("weather", '{"city": "Paris"}'))
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    first = client.messages.create(messages=[USER], tools=[WEATHER], thinking=thinking, **FIELDS | {"max_tokens": 1500})
    thought, text, use = first.content
    assert (thought.type, text.type, use.type) == ("thinking", "text", "tool_use")
    assert (thought.thinking, text.text, use.input) == ("hm", "I look.", {"city": "Paris"})
    assert first.stop_reason == "tool_use"

    model.will_say("It is warm.")
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "18"}]}
    history: Any = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=history, tools=[WEATHER], system="Be brief.", **FIELDS) as events:
        assert "".join(events.text_stream) == "It is warm."
    assert model.prompt.endswith(
        "<system>Be brief.<user>Paris?<assistant>I look.(hm)"
        f'<tool_call>weather {{"city": "Paris"}}</tool_call><tool>18#{use.id}<assistant>'
    )


def test_the_tool_runner_of_the_client(model: Model, client: anthropic.Anthropic) -> None:
    asked = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Returns the weather in a city."""
        asked.append(city)
        return "18"

    model.will_say(call_of("weather", '{"city": "Paris"}'), "It is warm.")
    runner = client.beta.messages.tool_runner(messages=[USER], tools=[weather], **FIELDS)
    assert [block.type for block in runner.until_done().content] == ["text"]
    assert asked == ["Paris"]


def test_counted_tokens(model: Model, client: anthropic.Anthropic) -> None:
    model.will_say("Warm.")
    fields: dict[str, Any] = {"model": "chat-model", "messages": [USER], "tools": [WEATHER], "system": "Be brief."}
    counted = client.messages.count_tokens(**fields).input_tokens
    assert counted == client.messages.create(max_tokens=9, **fields).usage.input_tokens > 0
    assert client.beta.messages.count_tokens(betas=["x"], **fields).input_tokens == counted


def test_a_stop_sequence(model: Model, client: anthropic.Anthropic) -> None:
    model.will_say("the quick brown fox")
    message = client.messages.create(messages=[USER], stop_sequences=["brown"], **FIELDS)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "brown")


def test_errors_by_class(
    model: Model, client: anthropic.Anthropic, new_router: Callable[..., Router], target: ScriptedTarget, tmp_path: Path
) -> None:
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="the model reads only text") as caught:
        client.messages.create(messages=[{"role": "user", "content": [image]}], **FIELDS)
    assert caught.value.request_id == caught.value.body["request_id"]
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(messages=[USER], **FIELDS | {"model": "claude"})
    with pytest.raises(anthropic.NotFoundError, match="no route"):
        client.messages.batches.list()

    keys = tmp_path / "keys"
    keys.write_text("alice:sk-alice-0123456789abcdef\n")
    keyed = new_router([target.address], api_keys_file=str(keys), requests_per_minute_per_key=2)
    fields: dict[str, Any] = {"model": keyed.model, "max_tokens": 5, "messages": [USER]}
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        client_of(keyed, api_key="sk-mallory-0123456789abcdef").messages.create(**fields)
    for settings in ({"api_key": "sk-alice-0123456789abcdef"}, {"auth_token": "sk-alice-0123456789abcdef"}):
        allowed = client_of(keyed, **{"api_key": None} | settings)
        assert allowed.messages.create(**fields).content
    with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
        allowed.messages.create(**fields)

    absent = client_of(new_router(["127.0.0.1:1"]))
    with pytest.raises(anthropic.InternalServerError, match="api_error"):
        absent.messages.create(**fields)

    model.will_say("the quick brown fox")
    model.target.fail_after, model.target.failure = 2, (grpc.StatusCode.INTERNAL, "secret")
    with (
        pytest.raises(anthropic.APIStatusError, match="worker failed"),
        client.messages.stream(messages=[USER], **FIELDS) as events,
    ):
        events.until_done()
