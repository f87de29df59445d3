"""Tokenising over HTTP, and the model's names, as vLLM's clients ask for them."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import MAX_MODEL_LEN, usage


def test_text_to_tokens_and_back(shared_router, tokenizer) -> None:
    token_ids = tokenizer.encode("the lazy dog")
    answer = shared_router.client.post("/tokenize", json={"prompt": "the lazy dog", "model": shared_router.model})
    assert answer.json() == {
        "count": len(token_ids),
        "max_model_len": MAX_MODEL_LEN,
        "tokens": token_ids,
        "token_strs": None,
    }
    assert shared_router.client.post("/detokenize", json={"tokens": token_ids}).json() == {"prompt": "the lazy dog"}


def test_tokens_as_the_vocabulary_spells_them(shared_router) -> None:
    spelled = shared_router.client.post(
        "/tokenize", json={"prompt": "a<|endoftext|>", "return_token_strs": True}
    ).json()
    assert spelled["token_strs"] == ["a", "<|endoftext|>"]
    text = shared_router.client.post("/detokenize", json={"tokens": spelled["tokens"]}).json()
    assert text == {"prompt": "a<|endoftext|>"}


def test_a_chat_is_rendered_first(shared_router, tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "the fox"}]}
    seen = shared_router.client.post("/tokenize", json=body).json()
    assert seen["tokens"] == tokenizer.encode("<user>the fox<assistant>", add_special_tokens=False)
    seen = shared_router.client.post("/tokenize", json=body | {"add_generation_prompt": False}).json()
    assert seen["tokens"] == tokenizer.encode("<user>the fox", add_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": 7}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10_000]}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens"),
    ],
)
def test_what_is_wrong_is_named(shared_router, path: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = shared_router.client.post(path, json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_ping(shared_router, new_router) -> None:
    assert shared_router.client.get("/ping").status_code == 200
    assert new_router(["127.0.0.1:9"]).client.get("/ping").status_code == 503


def test_a_name_for_clients(new_router, target, model_folder) -> None:
    router = new_router([target.address], served_model_name="fast/fox")
    (model,) = router.client.get("/v1/models").json()["data"]
    assert (model["id"], model["root"]) == ("fast/fox", str(model_folder))
    assert router.complete(model="fast/fox", prompt=[70]).json()["model"] == "fast/fox"
    assert router.complete(model=model_folder.name, prompt=[70]).status_code == 404
    assert 'model_name="fast/fox"' in router.client.get("/metrics").text


@pytest.mark.parametrize("n", [1, 2])
def test_every_event_may_have_the_usage_so_far(shared_router, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, done = shared_router.stream(prompt=[[70, 71], [80]], n=n, max_tokens=3, stream_options=options)
    assert done == "[DONE]"
    for index in range(2 * n):
        prompt_tokens = 2 if index < n else 1
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3]
        assert {usage["prompt_tokens"] for usage in usages} == {prompt_tokens}
    assert last["usage"] == usage(3, 6 * n)


def test_continuous_usage_alone_asks_for_nothing(shared_router) -> None:
    chunks = shared_router.stream(prompt=[70], max_tokens=3, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in chunks[:-1])


def test_special_tokens_are_text_when_asked(shared_router, tokenizer) -> None:
    prompt = [*tokenizer.encode("dog"), 0]
    shown = {"prompt": prompt, "max_tokens": len(prompt), "skip_special_tokens": False}
    assert shared_router.complete(**shown).json()["choices"][0]["text"] == "dog<|endoftext|>"
    streamed = shared_router.stream(**shown)
    assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == "dog<|endoftext|>"


@pytest.mark.parametrize(("kept", "expected"), [(2, [72, 73]), (4, [70, 71, 72, 73]), (9, [70, 71, 72, 73])])
def test_a_prompt_is_cut_to_its_end(router, target, kept: int, expected: list[int]) -> None:
    body = router.complete(prompt=[70, 71, 72, 73], max_tokens=3, truncate_prompt_tokens=kept).json()
    assert target.requests[-1].prompt_token_ids == expected
    assert body["usage"]["prompt_tokens"] == len(expected)


def test_a_long_prompt_is_cut_to_what_leaves_room(router, target) -> None:
    long = [70 + i % 30 for i in range(2 * MAX_MODEL_LEN)]
    assert router.complete(prompt=long, max_tokens=8).status_code == 400
    assert router.complete(prompt=long, max_tokens=8, truncate_prompt_tokens=-1).status_code == 200
    assert target.requests[-1].prompt_token_ids == long[-(MAX_MODEL_LEN - 8) :]
    nothing = router.complete(prompt=long, max_tokens=8, truncate_prompt_tokens=0)
    assert nothing.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("tokens", [[[]] * 50_000, [-1] * 500_000, [1] * 300_000])
def test_a_list_of_millions_is_refused_by_its_first_fault(new_router, target, tokens: list[Any]) -> None:
    router = new_router([target.address])
    answer = router.client.post("/detokenize", json={"tokens": tokens})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tokens"


def test_long_text_is_the_same_tokens(shared_router, tokenizer) -> None:
    text = "the quick brown fox " * 900
    long = shared_router.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert tokenizer.decode(long) == text
    assert long == tokenizer._tokenizer.encode(text).ids
