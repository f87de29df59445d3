"""Several choices and several prompts in one request."""

from __future__ import annotations

import collections

import grpc
import httpx
import pytest

from tests.waiting import wait_until

from .conftest import usage


def rotated(token_ids: list[int], by: int) -> list[int]:
    return token_ids[by:] + token_ids[:by]


def test_choices_differ_in_their_index_alone(router, target):
    body = router.complete(prompt=[70, 71, 72], n=3, max_tokens=3, seed=9, return_token_ids=True).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["token_ids"] for choice in body["choices"]] == [rotated([70, 71, 72], j) for j in range(3)]
    assert body["usage"] == usage(3, 9)
    by_index = sorted(target.requests, key=lambda request: request.choice_index)
    assert [request.choice_index for request in by_index] == [0, 1, 2]
    for request in by_index:
        request.choice_index = 0
        assert request == by_index[0]
    assert by_index[0].seed == 9


def test_a_batch_is_answered_prompt_by_prompt(router, target):
    prompts = [[70, 71], [80, 81, 82], [90]]
    body = router.complete(prompt=prompts, n=2, max_tokens=4, return_token_ids=True).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    expected = [(rotated(prompts[i // 2], i % len(prompts[i // 2])) * 4)[:4] for i in range(6)]
    assert [choice["token_ids"] for choice in body["choices"]] == expected
    assert body["usage"] == usage(6, 24)
    assert {request.seed for request in target.requests} == {body["seed"]}


@pytest.mark.parametrize("seed", [None, 9])
def test_prompts_that_are_alike_have_noise_of_their_own(router, target, seed):
    router.complete(prompt=[[70, 71]] * 3, n=2, max_tokens=2, seed=seed)
    assert sorted(request.choice_index for request in target.requests) == list(range(6))
    assert len({request.seed for request in target.requests}) == 1


def test_a_batch_of_texts(router):
    texts = ["the fox", "lazy 🦊 dog", "jumps"]
    body = router.complete(prompt=texts, max_tokens=30).json()
    assert all(text in choice["text"] for choice, text in zip(body["choices"], texts, strict=True))


def test_choices_run_at_once_and_their_pieces_interleave(router, target):
    target.delay_s = 0.02
    *chunks, usage_chunk, done = router.stream(
        prompt=[[70, 71], [80, 81]], n=2, max_tokens=6, return_token_ids=True, stream_options={"include_usage": True}
    )
    assert done == "[DONE]"
    token_ids = collections.defaultdict(list)
    finished = []
    for (choice,) in (chunk["choices"] for chunk in chunks):
        token_ids[choice["index"]] += choice["token_ids"]
        if choice["finish_reason"]:
            finished.append(choice["index"])
    assert token_ids == {0: [70, 71] * 3, 1: [71, 70] * 3, 2: [80, 81] * 3, 3: [81, 80] * 3}
    assert sorted(finished) == [0, 1, 2, 3]
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert set(order[:6]) == {0, 1, 2, 3}
    assert usage_chunk["usage"] == usage(4, 24)


def test_every_choice_of_a_streamed_chat_has_its_role_first_and_its_end_last(router):
    events = router.stream_chat(messages=[{"role": "user", "content": "fox"}], n=3, max_tokens=2)
    deltas = collections.defaultdict(list)
    for event in events[:-1]:
        (choice,) = event["choices"]
        deltas[choice["index"]].append((choice["delta"], choice["finish_reason"]))
    assert sorted(deltas) == [0, 1, 2]
    for choice in deltas.values():
        assert choice[0][0]["role"] == "assistant"
        assert choice[-1] == ({}, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_cancels_every_call(router, target, stream):
    target.hang_after = 1
    payload = {"prompt": [[70], [71]], "n": 4, "stream": stream}
    if stream:
        with router.client.stream("POST", "/v1/completions", json=payload) as response:
            pieces = response.iter_raw()  # forgetting it would close the stream
            assert next(pieces)
            wait_until(lambda: len(target.requests) == 8)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(router.url + "/v1/completions", json=payload, timeout=2)
    wait_until(lambda: target.num_cancelled == 8)


def test_one_failure_fails_the_request_and_cancels_the_others(router, target):
    target.delay_s = 0.2  # by then all have begun
    target.hang_after = 1
    target.failing_choice = 2
    target.failure = (grpc.StatusCode.INTERNAL, "secret")
    target.fail_after = 1
    response = router.complete(prompt=[70], n=4, max_tokens=4)
    assert response.status_code == 500
    assert "secret" not in response.text
    wait_until(lambda: target.num_cancelled == 3)
    events = router.stream(prompt=[70], n=4, max_tokens=4)
    assert events[-1]["error"]["type"] == "internal_error"
    assert "[DONE]" not in events
    wait_until(lambda: target.num_cancelled == 6)
    target.failing_choice = -1
    target.hang_after = None
    assert router.complete(prompt=[70], n=4).status_code == 200


def test_the_sequences_of_a_request_are_spread_over_the_replicas(new_target, new_router):
    targets = [new_target(), new_target()]
    targets[1].description.load.num_running = 3  # and 2 waiting: two more than on the other
    router = new_router([target.address for target in targets])
    assert router.complete(prompt=[[70]] * 5, n=2, max_tokens=3).status_code == 200
    assert [len(target.requests) for target in targets] == [6, 4]


def test_as_many_sequences_as_a_request_may_have(router, target):
    body = router.complete(prompt=[[70]] * 256, n=4, max_tokens=1).json()
    assert len(body["choices"]) == 1024
    assert len(target.requests) == 1024


def test_metrics_count_a_prompt_once(router):
    router.complete(prompt=[[70, 71], [72]], n=3, max_tokens=2)
    page = router.client.get("/metrics").text
    assert f'vllm:prompt_tokens_total{{engine="router",model_name="{router.model}"}} 3.0' in page
    assert f'vllm:generation_tokens_total{{engine="router",model_name="{router.model}"}} 12.0' in page
    assert f'outrider_requests_total{{code="200",model_name="{router.model}"}} 1.0' in page


def test_cached_tokens_of_a_prompt_count_once(router, target):
    """Each of two prompts has two choices."""
    target.num_cached_tokens = 1
    fields = {"prompt": [[70, 71], [72, 73]], "n": 2, "max_tokens": 2}
    assert router.complete(**fields).json()["usage"] == usage(4, 8, 2)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = router.stream(**fields, stream_options=options)
    assert last["usage"] == usage(4, 8, 2)
    cached = [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks if chunk["choices"]]
    assert {0, 1} == set(cached)


def test_cached_tokens_are_those_of_the_prompt_alone(router, target):
    target.num_cached_tokens = 9  # a target that went on with an answer of another has its tokens, too
    assert router.complete(prompt=[70, 71], max_tokens=2).json()["usage"] == usage(2, 2, 2)


def test_answers_of_one_model_have_one_fingerprint(router, target):
    chunks = router.stream(prompt=[70], max_tokens=2)[:-1]
    whole = router.complete(prompt=[71], max_tokens=1).json()
    assert {chunk["system_fingerprint"] for chunk in [*chunks, whole]} == {whole["system_fingerprint"]}
    assert whole["system_fingerprint"].startswith("fp_")
