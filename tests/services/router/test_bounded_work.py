"""Work on a request is bounded before it is done: by what fits, not only by the body's size."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from cluster.tokenization import Tokenizer
from services.router.chat.special_tokens import SpecialTokenGuard
from services.router.http import large_work
from services.router.http.content_encoding import _MAX_MEMBERS

from .chat_model import USER, Model
from .conftest import Router

LONG = "fox " * 20_000


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the texts that are encoded."""
    lengths: list[int] = []
    encode = Tokenizer.encode

    def note(self: Tokenizer, text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", note)
    return lengths


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", {"messages": [USER | {"content": LONG}]}),
        ("/v1/messages", {"messages": [USER | {"content": LONG}], "max_tokens": 4}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/responses", {"input": LONG, "truncation": "auto"}),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_encoded(
    model: Model, encoded: list[int], path: str, body: dict[str, Any]
) -> None:
    response = model.router.client.post(path, json=body)
    assert response.status_code == 400
    assert "tokens" in response.json()["error"]["message"]
    assert not [length for length in encoded if length >= len(LONG)]


def test_prompts_that_are_truncated_may_be_longer(model: Model) -> None:
    body = {"prompt": LONG, "truncate_prompt_tokens": 5, "max_tokens": 4}
    assert model.router.client.post("/v1/completions", json=body).status_code == 200


def test_truncation_of_a_long_history_encodes_little(model: Model, encoded: list[int]) -> None:
    history = [{"role": "user", "content": "fox " * 100} for _ in range(1000)]
    body = {"input": history, "truncation": "auto", "max_output_tokens": 4}
    assert model.router.client.post("/v1/responses", json=body).status_code == 200
    assert sum(encoded) < 1000 * 400  # less than the whole history once


def test_a_body_of_many_gzip_members_is_refused(shared_router: Router) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    body = gzip.compress(json.dumps({"prompt": "fox", "max_tokens": 2}).encode())
    for count, status in ((_MAX_MEMBERS - 1, 200), (_MAX_MEMBERS, 400)):
        padded = body + gzip.compress(b"") * count
        assert shared_router.client.post("/v1/completions", content=padded, headers=headers).status_code == status


def test_stand_ins_avoid_characters_and_their_escapes() -> None:
    private = "".join(map(chr, range(0xE000, 0xF8FF)))
    text = private + r"\uf8ff <|end|>"
    disguised, stand_ins = SpecialTokenGuard(["<|end|>"]).disguise(text, avoid="")
    ((chosen, first),) = stand_ins.items()
    assert (first, ord(chosen) > 0xF8FF) == ("<", True)
    assert disguised == text.replace("<", chosen)


@pytest.mark.parametrize("field", ["response_format", "tools", "guided_json", "structured_outputs", "bad_words"])
def test_schemas_and_bad_words_are_read_beside_the_event_loop(
    new_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    model, threaded = new_model(), []
    run_in_thread = large_work.run_in_thread

    async def note(num_bytes: int, work: Callable[[], Any]) -> Any:
        threaded.append(work)
        return await run_in_thread(num_bytes, work)

    monkeypatch.setattr(large_work, "run_in_thread", note)
    schema = {"type": "object"}
    value: Any = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "guided_json": schema,
        "structured_outputs": {"json": schema},
        "bad_words": ["fox"],
    }[field]
    assert model.router.chat(messages=[USER], max_tokens=4).status_code == 200
    assert not threaded
    assert model.router.chat(messages=[USER], max_tokens=4, **{field: value}).status_code == 200
    assert threaded


@pytest.mark.parametrize("is_streamed", [False, True])
def test_many_log_probabilities_are_formatted_beside_the_event_loop(
    model: Model, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    threaded = []
    run_in_thread = large_work.run_in_thread

    async def note(num_bytes: int, work: Callable[[], Any]) -> Any:
        threaded.append(work)
        return await run_in_thread(num_bytes, work)

    monkeypatch.setattr(large_work, "run_in_thread", note)
    for num_tokens, is_large in ((10, False), (1000, True)):
        body = {"prompt": [70] * num_tokens, "max_tokens": 2, "logprobs": 2, "echo": True, "stream": is_streamed}
        assert model.router.complete(**body).status_code == 200
        assert bool(threaded) == is_large
