"""A published model that is made to think: its template opens the reasoning, and examples show how it ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from services.launch.local import LocalCluster
from tests.soak import length

from .conftest import serving

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 40}, "is_sure": {"type": "boolean"}},
    "required": ["answer", "is_sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
CAPITALS = {"type": "function", "function": {"name": "capital", "parameters": {"type": "object", "properties": {}}}}
EXAMPLES = (
    ("What is 2 plus 2?", "Two and two make four.", "four"),
    ("What color is grass?", "Grass is green in spring.", "green"),
    ("How many days has a week?", "A week has seven days.", "seven"),
)
QUESTIONS = ("What is the capital of France?", "What is 3 plus 4?", "What color is the sky?")
# Requests of each combination of schema and tools. LEAST_ANSWERS: answers whose reasoning must end within max_tokens.
NUM_REQUESTS, LEAST_ANSWERS = length((4, 2), (12, 6))


@pytest.fixture(scope="module")
def thinking_cluster(instruct_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(instruct_folder, folder)
    template = folder / "chat_template.jinja"
    opened = "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    template.write_text(template.read_text(encoding="utf-8") + opened, encoding="utf-8")
    with serving(folder) as running:
        yield running


def asked(question: str, *, has_schema: bool, has_tools: bool, seed: int) -> dict[str, Any]:
    messages: list[dict[str, str]] = []
    for user, thought, answer in EXAMPLES:
        said = json.dumps({"answer": answer, "is_sure": True}) if has_schema else answer.capitalize() + "."
        messages.append({"role": "user", "content": user})
        messages.append({"role": "assistant", "content": f"<think>\n{thought}</think>\n\n{said}"})
    body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": question}], "max_tokens": 80}
    body |= {"response_format": FORMAT} if has_schema else {}
    body |= {"tools": [CAPITALS]} if has_tools else {}
    return body | {"seed": seed, "temperature": 0.7 * (seed % 2)}


def whole(client: openai.OpenAI, body: dict[str, Any], k: int) -> tuple[Any, ...]:
    more = {"num_speculative_tokens": k}
    (choice,) = client.chat.completions.create(model="model", **body, extra_body=more).choices
    reasoning = getattr(choice.message, "reasoning_content", None)
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content or "", reasoning or "", calls, choice.finish_reason


def streamed(client: openai.OpenAI, body: dict[str, Any], k: int) -> tuple[Any, ...]:
    content, reasoning, finish_reason = "", "", None
    calls: list[list[str]] = []
    more = {"num_speculative_tokens": k}
    for chunk in client.chat.completions.create(model="model", **body, stream=True, extra_body=more):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                calls.append([call.function.name, ""])
            calls[-1][1] += call.function.arguments or ""
        finish_reason = choice.finish_reason or finish_reason
    return content, reasoning, [tuple(call) for call in calls], finish_reason


def test_reasoning_and_answer_are_the_same_with_drafts_and_streamed(thinking_cluster: LocalCluster) -> None:
    client = openai.OpenAI(base_url=f"{thinking_cluster.url}/v1", api_key="none", max_retries=0, timeout=300)
    num_answers = 0
    for number in range(NUM_REQUESTS):
        has_schema, has_tools = number % 2 == 0, number % 4 < 2
        body = asked(QUESTIONS[number % 3], has_schema=has_schema, has_tools=has_tools, seed=number)
        plain = whole(client, body, 0)
        assert [whole(client, body, 4), streamed(client, body, 0), streamed(client, body, 4)] == [plain] * 3
        content, reasoning, calls, finish_reason = plain
        assert reasoning
        assert "</think>" not in content + reasoning
        num_answers += bool(content or calls)
        if has_schema and finish_reason != "length":
            jsonschema.validate(json.loads(content), SCHEMA)
    assert num_answers >= LEAST_ANSWERS
