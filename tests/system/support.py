"""The table of `docs/API.md` that says what each engine supports, and a request for each of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.waiting import WAIT_S

_PAGE = Path(__file__).parents[2] / "docs" / "API.md"
_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
_COMPLETIONS: dict[str, dict[str, Any]] = {
    "sampling: temperature, top-p, top-k, min-p, penalties, bias, seed": {
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1},
        "seed": 1,
    },
    "`n`, streaming, stop strings, `echo`": {"n": 2, "stream": True, "stop": ["never"], "echo": True},
    "`stop_token_ids`, `ignore_eos`": {"stop_token_ids": [5], "ignore_eos": True},
    "`priority`, `cache_salt`, `prompt_cache_key`": {"priority": 3, "cache_salt": "a", "prompt_cache_key": "a"},
    "`logprobs`": {"logprobs": 2},
    "`prompt_logprobs`, scoring of prompts": {"prompt_logprobs": 1, "max_tokens": 0},
    "`allowed_token_ids`": {"allowed_token_ids": [40, 41]},
    "`bad_words`": {"bad_words": ["fox"]},
    "`min_tokens`": {"min_tokens": 2},
    "JSON mode and schemas": {"response_format": {"type": "json_object"}},
    "regular expressions, choices, grammars, structural tags": {"guided_regex": "[a-f]+"},
    "`suffix`": {"suffix": "x"},
    "`best_of`, beam search": {"best_of": 2},
    "`logits_processors`": {"logits_processors": ["x"]},
}
_CHATS: dict[str, dict[str, Any]] = {
    "tools, `tool_choice` `auto`": {"tools": _TOOLS},
    "`tool_choice` `required` or a function": {"tools": _TOOLS, "tool_choice": "required"},
    "images, audio": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    },
}


def supported(engine: str) -> dict[str, bool]:
    """Returns the table's column of `engine`, by feature."""
    lines = _PAGE.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| feature |"))
    engines = [cell.strip(" `") for cell in lines[start].strip("|").split("|")[1:]]
    table: dict[str, bool] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        feature, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        said = cells[engines.index(engine)]
        assert said in ("yes", "no"), line
        table[feature] = said == "yes"
    return table


def assert_table_is_true(url: str, engine: str) -> None:
    table = supported(engine)
    assert len(table) >= 18
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        for feature, is_supported in table.items():
            response = _ask(client, feature)
            expected = 200 if is_supported else 400
            assert response.status_code == expected, (engine, feature, response.status_code, response.text)
        if engine != "simulated":
            _assert_cached_tokens_are_told(client)


def _assert_cached_tokens_are_told(client: httpx.Client) -> None:
    """The same prompt again and again: some target has seen it."""
    body = {"prompt": [5 + 7 * place % 2000 for place in range(400)], "max_tokens": 1}
    usages = [client.post("/v1/completions", json=body).json()["usage"] for _ in range(4)]
    counts = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert counts[0] == 0
    assert 0 < max(counts) < 400


def _ask(client: httpx.Client, feature: str) -> httpx.Response:
    if feature in _COMPLETIONS:
        return client.post("/v1/completions", json={"prompt": "fox", "max_tokens": 5, **_COMPLETIONS[feature]})
    if feature == "`/v1/responses`":
        return client.post("/v1/responses", json={"input": "fox", "max_output_tokens": 16})
    if feature == "`/v1/messages`":
        message = {"role": "user", "content": "fox"}
        return client.post("/v1/messages", json={"messages": [message], "max_tokens": 16})
    body = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 5, **_CHATS[feature]}
    return client.post("/v1/chat/completions", json=body)
