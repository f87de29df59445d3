"""Fields that become variables of the chat template, and fields that change nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from .chat_model import USER, Model
from .test_request_validation import assert_error

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}|{{ reasoning_effort }}|{{ enable_thinking }}|{{ more }}"
    "{# </think> #}"
)
EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "||"),
    *(({"reasoning_effort": effort}, f"{effort}||") for effort in EFFORTS[1:]),
    ({"reasoning_effort": "none"}, "none|False|"),
    ({"reasoning_effort": None, "enable_thinking": None}, "||"),
    ({"enable_thinking": False}, "|False|"),
    ({"enable_thinking": True}, "|True|"),
    ({"reasoning_effort": "none", "enable_thinking": True}, "none|True|"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"more": "x"}}, "low||x"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none|True|"),
    (
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "y"}},
        "y|False|",
    ),
]


@pytest.fixture
def showing(new_model: Callable[..., Model]) -> Model:
    """A model whose prompt shows the variables."""
    model = new_model(TEMPLATE)
    model.will_say("So.")
    return model


def test_they_reach_the_template_of_a_chat(showing: Model) -> None:
    for fields, expected in CASES:
        showing.chat(**fields)
        assert showing.prompt == f"Paris?|{expected}", fields


def test_they_reach_the_template_of_a_response(showing: Model) -> None:
    for fields, expected in CASES:
        others = {name: value for name, value in fields.items() if name != "reasoning_effort"}
        body = {"input": "Paris?", "reasoning": {"effort": fields.get("reasoning_effort"), "summary": "auto"}} | others
        response = showing.router.client.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        assert showing.prompt == f"Paris?|{expected}", fields


def test_they_reach_the_template_of_a_prompt_that_is_only_tokenised(showing: Model) -> None:
    for fields, expected in CASES:
        tokens = showing.router.client.post("/tokenize", json={"messages": [USER]} | fields).json()["tokens"]
        assert showing.tokenizer.decode(tokens) == f"Paris?|{expected}", fields


@pytest.mark.parametrize("field", ["reasoning_effort", "enable_thinking"])
@pytest.mark.parametrize("value", ["loud", "", 5, ["low"], {}])
def test_another_value_is_refused(shared_router, field: str, value: object) -> None:
    response = shared_router.chat(messages=[USER], **{field: value})
    assert_error(response, 400, "invalid_request_error", field)


@pytest.mark.parametrize("value", ["loud", 5])
def test_another_effort_of_a_response_is_refused(shared_router, value: object) -> None:
    response = shared_router.client.post("/v1/responses", json={"input": "fox", "reasoning": {"effort": value}})
    assert "reasoning.effort should be" in assert_error(response, 400, "invalid_request_error", "reasoning")["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"verbosity": "low"},
        {"prediction": {"type": "content", "content": "So."}},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"modalities": ["text"]},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"prompt_cache_key": "x", "safety_identifier": "x", "service_tier": "flex", "store": True, "user": "x"},
    ],
)
def test_what_changes_no_text_is_taken_without_a_warning(
    model: Model, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model.will_say("So.")
    plain = model.chat()
    with caplog.at_level(logging.WARNING):
        assert model.chat(**fields) == plain
    assert not [record for record in caplog.records if record.name == "services.router.errors"]


@pytest.mark.parametrize("modalities", [["audio"], ["text", "audio"]])
def test_spoken_answers_are_refused(shared_router, modalities: list[str]) -> None:
    response = shared_router.chat(messages=[USER], modalities=modalities, audio={"voice": "alloy", "format": "wav"})
    assert_error(response, 400, "invalid_request_error", "modalities")
