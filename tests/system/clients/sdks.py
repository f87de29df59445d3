"""One turn with a tool and one typed answer through an unmodified client library: `python sdks.py LIBRARY URL`.

It runs in an environment of its own, as these libraries' requirements differ. It prints what the library returned.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

from pydantic import BaseModel

MODEL, QUESTION = "chat-model", "Paris?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}}


class Weather(BaseModel):
    city: str
    degrees: int


def weather(city: str) -> str:
    """The weather in a city."""
    return f"18 degrees in {city}"


def use_litellm(url: str) -> tuple[str, object]:
    import litellm

    settings = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    messages: list[object] = [{"role": "user", "content": QUESTION}]
    first = litellm.completion(messages=messages, tools=[TOOL], **settings).choices[0].message
    (call,) = first.tool_calls
    result = weather(**json.loads(call.function.arguments))
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    chunks = litellm.completion(messages=messages, tools=[TOOL], stream=True, **settings)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    typed = litellm.completion(messages=messages[:1], response_format=Weather, **settings)
    return text, json.loads(typed.choices[0].message.content)


def use_langchain(url: str) -> tuple[str, object]:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0)
    bound = chat.bind_tools([weather])
    asked = HumanMessage(QUESTION)
    first = bound.invoke([asked])
    (call,) = first.tool_calls
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    text = "".join(str(chunk.content) for chunk in bound.stream([asked, first, result]))
    return text, chat.with_structured_output(Weather).invoke(QUESTION).model_dump()


def use_pydantic_ai(url: str) -> tuple[str, object]:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))

    async def run() -> tuple[str, object]:
        text = (await Agent(model, tools=[weather]).run(QUESTION)).output
        typed = (await Agent(model, output_type=NativeOutput(Weather)).run(QUESTION)).output
        return text, typed.model_dump()

    return asyncio.run(run())


def use_instructor(url: str) -> tuple[str, object]:
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": QUESTION}]
    by_call = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    called = by_call.create(model=MODEL, messages=messages, response_model=Weather, max_retries=0)
    by_schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    typed = by_schema.create(model=MODEL, messages=messages, response_model=Weather, max_retries=0)
    return called.city, typed.model_dump()


LIBRARIES: dict[str, Callable[[str], tuple[str, object]]] = {
    "litellm": use_litellm,
    "langchain": use_langchain,
    "pydantic_ai": use_pydantic_ai,
    "instructor": use_instructor,
}

if __name__ == "__main__":
    text, typed = LIBRARIES[sys.argv[1]](sys.argv[2])
    print(json.dumps({"text": text, "typed": typed}))
