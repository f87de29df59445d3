"""The answers of POST /v1/chat/completions, whole and streamed, through real servers."""

from __future__ import annotations

import json

import grpc
import httpx
import openai
import pytest

from tests.waiting import WAIT_S

from .conftest import MAX_MODEL_LEN

MESSAGES = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "fox"}, {"type": "text", "text": "🦊"}]},
    {"role": "assistant", "content": "dog", "refusal": None},
    {"role": "user", "content": "why?"},
]
RENDERED = "<system>be brief<user>fox\n🦊<assistant>dog<user>why?<assistant>"


def test_a_whole_answer(router, target, tokenizer):
    prompt = tokenizer.encode(RENDERED)
    response = router.chat(model=router.model, messages=MESSAGES, max_tokens=len(prompt), seed=-7)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": RENDERED, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert body["usage"]["prompt_tokens"] == body["usage"]["completion_tokens"] == len(prompt)
    assert body["seed"] == -7
    assert response.headers["x-outrider-seed"] == "-7"
    assert list(target.requests[-1].prompt_token_ids) == prompt


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
    ],
)
def test_the_length_of_an_answer(router, target, fields, expected):
    body = router.chat(messages=MESSAGES, **fields).json()
    rest_of_context = MAX_MODEL_LEN - body["usage"]["prompt_tokens"]
    assert target.requests[-1].max_tokens == body["usage"]["completion_tokens"] == (expected or rest_of_context)


def test_the_generation_prompt_can_be_left_out(router, target, tokenizer):
    router.chat(messages=MESSAGES, add_generation_prompt=False, max_tokens=1)
    assert list(target.requests[-1].prompt_token_ids) == tokenizer.encode(RENDERED.removesuffix("<assistant>"))


@pytest.mark.parametrize("tokens_per_reply", [1, 4])
def test_stream_says_what_the_whole_answer_says(router, target, tokens_per_reply):
    target.tokens_per_reply = tokens_per_reply
    fields = {"messages": MESSAGES, "max_tokens": 30, "seed": 1}
    whole = router.chat(**fields).json()
    *chunks, done = router.stream_chat(**fields)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
    text = "".join(choice["delta"]["content"] for choice in choices[:-1])
    assert text == whole["choices"][0]["message"]["content"]


def test_usage_of_a_stream_comes_last_and_alone(router):
    fields = {"messages": MESSAGES, "max_tokens": 3}
    *chunks, usage_chunk, _ = router.stream_chat(stream_options={"include_usage": True}, **fields)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage_chunk["choices"] == []
    assert usage_chunk["usage"] == router.chat(**fields).json()["usage"]


def test_token_ids_are_returned_when_asked_for(router, tokenizer):
    prompt = tokenizer.encode(RENDERED)
    fields = {"messages": MESSAGES, "max_tokens": len(prompt), "return_token_ids": True}
    assert router.chat(**fields).json()["choices"][0]["token_ids"] == prompt
    events = router.stream_chat(**fields)
    assert [t for event in events[:-1] for choice in event["choices"] for t in choice["token_ids"]] == prompt


def test_a_model_without_a_template_says_so(new_router, target, model_folder, tmp_path):
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    router = new_router([target.address], folder=tmp_path)
    response = router.chat(messages=MESSAGES)
    assert response.status_code == 400
    assert "chat template" in response.json()["error"]["message"]
    assert router.complete(prompt="fox").status_code == 200


def test_what_the_template_refuses_is_told(new_model):
    model = new_model("{% if messages %}{{ raise_exception('one user message, please') }}{% endif %}")
    error = model.router.chat(messages=MESSAGES).json()["error"]
    assert "one user message, please" in error["message"]


def test_leaving_cancels_the_call(router, target):
    target.hang_after = 2
    body = json.dumps({"messages": MESSAGES, "stream": True})
    headers = {"content-type": "application/json"}
    with router.client.stream("POST", "/v1/chat/completions", content=body, headers=headers) as response:
        pieces = response.iter_raw()  # forgetting it would close the stream
        assert next(pieces)
    assert target.cancelled.wait(WAIT_S)
    target.cancelled.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(router.url + "/v1/chat/completions", json={"messages": MESSAGES}, timeout=2)
    assert target.cancelled.wait(WAIT_S)


def test_the_official_client(router, tokenizer):
    client = router.openai()
    assert client.models.retrieve(router.model).id == router.model
    fields = {"model": router.model, "messages": MESSAGES, "max_completion_tokens": 50, "seed": 5, "n": 2, "stop": "y?"}
    whole = client.chat.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == RENDERED.partition("y?")[0]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(tokenizer.encode(RENDERED))

    texts = ["", ""]
    with client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunks[-1].usage == whole.usage


def test_the_official_clients_own_accumulation_of_a_stream(router):
    client = router.openai()
    # The client takes an answer that was cut off for an error of its own.
    fields = {"model": router.model, "messages": MESSAGES, "stop": "why"}
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == client.chat.completions.create(**fields).choices[0].message.content


def test_the_official_client_raises_its_own_errors(router, target):
    client = router.openai()
    fields = {"model": router.model, "messages": MESSAGES}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**fields, tools=[{"type": "function", "function": {"name": "f g"}}])
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**(fields | {"messages": MESSAGES[1:] * 100}))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**(fields | {"model": "gpt-9"}))
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    target.fail_after = 0
    target.failure = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    with pytest.raises(openai.InternalServerError, match="targets are full") as failed:
        client.chat.completions.create(**fields)
    assert failed.value.status_code == 503
    target.fail_after = 1
    target.failure = (grpc.StatusCode.INTERNAL, "secret")
    with pytest.raises(openai.APIError, match="worker failed"):
        list(client.chat.completions.create(**fields, stream=True))
