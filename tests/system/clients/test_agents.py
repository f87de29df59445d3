"""OpenAI's agents: their loop of tools, on chats and on responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

from services.launch.local import LocalCluster
from tests.services.router.chat_model import Model, call_of

KINDS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]


@pytest.fixture(autouse=True)
def _no_traces() -> None:
    set_tracing_disabled(True)


def make_agent(kind: Any, url: str, name: str, **settings: Any) -> tuple[Agent[Any], list[str]]:
    asked: list[str] = []

    @function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "18 degrees"

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    agent = Agent(
        name="guide",
        instructions="Tell the weather.",
        model=kind(model=name, openai_client=client),
        tools=[weather],
        model_settings=ModelSettings(**settings),
    )
    return agent, asked


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_is_called_and_its_result_used(model: Model, kind: Any) -> None:
    model.will_say("<think>hm</think>" + call_of("weather", '{"city": "Paris"}'), "It is warm.")
    agent, asked = make_agent(kind, model.router.url, "chat-model")
    result = Runner.run_sync(agent, "Paris?", max_turns=3)
    assert asked == ["Paris"]
    assert result.final_output == "It is warm."
    assert "<tool>18 degrees#call_" in model.prompt


class Weather(BaseModel):
    city: str
    degrees: int


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_is_called_where_the_answer_has_a_type(model: Model, kind: Any) -> None:
    model.will_say(call_of("weather", '{"city": "Paris"}'), '{"city": "Paris", "degrees": 18}')
    agent, asked = make_agent(kind, model.router.url, "chat-model")
    agent.output_type = Weather
    result = Runner.run_sync(agent, "Paris?", max_turns=3)
    assert asked == ["Paris"]
    assert result.final_output == Weather(city="Paris", degrees=18)
    grammar = json.loads(model.target.requests[0].constraints.grammar.structural_tag)
    assert "<tool_call>" in json.dumps(grammar)
    assert "degrees" in json.dumps(grammar)


async def _stream(model: Model, kind: Any) -> tuple[list[str], str]:
    agent, asked = make_agent(kind, model.router.url, "chat-model")
    result = Runner.run_streamed(agent, "Paris?", max_turns=3)
    async for _ in result.stream_events():
        pass
    return asked, result.final_output


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_streamed(model: Model, kind: Any) -> None:
    model.will_say(call_of("weather", '{"city": "Paris"}'), "It is warm.")
    assert asyncio.run(_stream(model, kind)) == (["Paris"], "It is warm.")


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_model_is_made_to_call(instruct_cluster: LocalCluster, kind: Any) -> None:
    name = "instruct"
    settings = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": 200}
    agent, asked = make_agent(kind, instruct_cluster.url, name, **settings)
    agent.tool_use_behavior = "stop_on_first_tool"  # what a model of this size says of it isn't worth much
    result = Runner.run_sync(agent, "What is the weather in Paris?", max_turns=3)
    assert asked
    assert result.final_output == "18 degrees"
