"""Requests with every feature that looks at, or limits, what is sampled; and how their answers are compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

Body = dict[str, Any]

PERSON: Body = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 8}, "number": {"type": "integer"}},
            "required": ["street"],
        },
    },
    "required": ["name", "age", "tags"],
}

# Any text up to a mark, then a form, as of an answer that begins with reasoning.
_AFTER_A_LINE: Body = {
    "type": "sequence",
    "elements": [
        {"type": "any_text", "excludes": ["\n"]},
        {"type": "const_string", "value": "\n"},
        {"type": "regex", "pattern": "[0-9]{3}-[a-f]+( and [A-Z][a-z]*){1,3}"},
    ],
}

_CONSTRAINTS: dict[str, Body] = {
    "nothing": {},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
    "regex": {"structured_outputs": {"regex": "[0-9]{3}-[a-f]+( and [A-Z][a-z]*){1,3}"}},
    "choice": {"guided_choice": ["yes", "no", 'per"haps\\\n', "never again"]},
    "grammar": {"guided_grammar": 'root ::= item ("," item)*\nitem ::= [a-z]+ "=" [0-9]{1,4}'},
    "allowed": {"allowed_token_ids": list(range(3, 4096, 7)), "ignore_eos": True},
    "bad words": {"bad_words": ["the", "self", "return None", " ="], "ignore_eos": True},
    "min tokens": {"min_tokens": 12, "stop_token_ids": list(range(3, 200))},
    "stop tokens": {"stop_token_ids": list(range(200, 300)), "include_stop_str_in_output": True},
    "form after a line": {
        "structured_outputs": {"structural_tag": {"type": "structural_tag", "format": _AFTER_A_LINE}}
    },
}
_SAMPLING: dict[str, Body] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0},
    "shaped": {
        "temperature": 0.9,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {"30": 2.0, "200": -5.0},
    },
}
_PROMPTS = ("def add(a, b):\n    return", "import os\n\nclass Reader:\n    def", "x")


def shaped_bodies() -> Iterator[tuple[str, Body]]:
    """Yields bodies of completion requests, each with a name."""
    number = 0
    for constraint, constraints in _CONSTRAINTS.items():
        for sampling, parameters in _SAMPLING.items():
            number += 1
            body = {
                "prompt": _PROMPTS[number % len(_PROMPTS)],
                "max_tokens": 60,
                "seed": number,
                "logprobs": number % 4,
                "return_token_ids": True,
                **constraints,
                **parameters,
            }
            if number % 5 == 0:
                body["n"] = 3
            if number % 7 == 0:
                body["echo"] = True
            if number % 3 == 0:
                body["prompt_logprobs"] = 2
            yield f"{constraint}, {sampling}", body


def one_of_each_constraint() -> dict[str, Body]:
    """Returns one of `shaped_bodies` for each constraint, with the kinds of sampling in turn."""
    bodies, kinds = list(shaped_bodies()), len(_SAMPLING)
    return dict(bodies[kinds * number + number % kinds] for number in range(len(_CONSTRAINTS)))


def answer(client: httpx.Client, body: Body) -> list[Body]:
    """The choices of the answer to `body`."""
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, (body, response.text)
    choices: list[Body] = response.json()["choices"]
    return choices


def streamed(client: httpx.Client, body: Body) -> list[Body]:
    """The same as `answer`, from the events of a streamed answer."""
    choices: dict[int, Body] = {}
    more = {key: value for key, value in body.items() if key != "prompt_logprobs"}
    with client.stream("POST", "/v1/completions", json={**more, "stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for piece in json.loads(line.removeprefix("data: "))["choices"]:
                choice = choices.setdefault(piece["index"], {"text": "", "token_ids": [], "logprobs": None})
                choice["text"] += piece["text"]
                choice["token_ids"] += piece["token_ids"]
                choice["finish_reason"] = piece["finish_reason"]
                if piece["logprobs"] is not None:
                    scores = choice["logprobs"] or {}
                    choice["logprobs"] = {
                        key: scores.get(key, []) + piece["logprobs"][key] for key in piece["logprobs"]
                    }
    return [choices[index] for index in sorted(choices)]


def assert_alike(first: list[Body], second: list[Body], tolerance: float = 1e-4) -> None:
    """Token for token, and each log-probability within `tolerance`."""
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
        _assert_close(one["logprobs"], other["logprobs"], tolerance)
        if "prompt_logprobs" in one and "prompt_logprobs" in other:
            _assert_close(one["prompt_logprobs"], other["prompt_logprobs"], tolerance)


def _assert_close(one: Any, other: Any, tolerance: float) -> None:
    if isinstance(one, float) and isinstance(other, float):
        assert abs(one - other) <= tolerance
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _assert_close(one[key], other[key], tolerance)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _assert_close(a, b, tolerance)
    else:
        assert one == other
