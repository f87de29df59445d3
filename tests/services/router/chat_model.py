"""A chat model that knows tools and reasons, and says what it is told to; its fixtures are in conftest.py."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cluster.tokenization import Tokenizer

if TYPE_CHECKING:
    from .conftest import Router, ScriptedTarget

HERMES_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %} in <tool_call></tool_call></tools>"
    "{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinks %}<think>\n{% endif %}{% endif %}{# </think> #}"
)
MISTRAL_TEMPLATE = HERMES_TEMPLATE.replace("<tool_call></tool_call>", "[TOOL_CALLS]")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ENFORCED = PARAMETERS | {"additionalProperties": False}  # as a grammar has them
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time"}}
USER = {"role": "user", "content": "Paris?"}
MARKERS = ["[TOOL_CALLS]", "<|end|>"]
NAMED = {"type": "function", "function": {"name": "weather"}}


class Model:
    """A router of a chat model that says what it is told to."""

    def __init__(self, router: Router, target: ScriptedTarget, tokenizer: Tokenizer) -> None:
        self.router = router
        self.target = target
        self.tokenizer = tokenizer

    def will_say(self, *texts: str) -> None:
        """One after the other; the last again and again."""
        self.target.scripts = [self.tokenizer.encode(text) for text in texts]

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.target.requests[-1].prompt_token_ids, skip_special_tokens=False)

    @property
    def grammar(self) -> Any:
        """The schema of the answer that the last request demanded, after any reasoning."""
        constraints = self.target.requests[-1].constraints
        if not constraints.HasField("grammar"):
            return None
        if constraints.grammar.json_schema:
            return json.loads(constraints.grammar.json_schema)
        part = self.tag
        while part["type"] != "json_schema":
            part = part["elements"][0 if part["type"] == "or" else -1]
        return part["json_schema"]

    @property
    def tag(self) -> Any:
        """The structural tag of the last request."""
        return json.loads(self.target.requests[-1].constraints.grammar.structural_tag)["format"]

    def chat(self, **fields: Any) -> dict[str, Any]:
        response = self.router.chat(**{"messages": [USER], "tools": [WEATHER, TIME]} | fields)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return choice

    def stream(self, **fields: Any) -> list[dict[str, Any]]:
        *chunks, done = self.router.stream_chat(**{"messages": [USER], "tools": [WEATHER, TIME]} | fields)
        assert done == "[DONE]"
        return [choice for chunk in chunks for choice in chunk["choices"]]


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def functions_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
