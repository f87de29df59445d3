"""The answers of POST /v1/completions, whole and streamed, through real servers."""

from __future__ import annotations

import grpc
import httpx
import openai
import pytest

from tests.waiting import WAIT_S

from .conftest import usage, wait_for_health


def text_of(events: list) -> str:
    return "".join(choice["text"] for event in events[:-1] for choice in event["choices"])


def metric(router, name: str) -> float:
    for line in router.client.get("/metrics").text.splitlines():
        if line.startswith(name + "{") or line.startswith(name + " "):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no metric {name}")


def test_a_whole_answer(router, target, tokenizer):
    prompt = "the lazy dog"
    num_tokens = len(tokenizer.encode(prompt))
    response = router.complete(model=router.model, prompt=prompt, max_tokens=num_tokens, seed=-7)
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == router.model
    assert body["choices"] == [{"index": 0, "text": prompt, "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == usage(num_tokens, num_tokens)
    assert body["seed"] == -7
    assert response.headers["x-outrider-seed"] == "-7"


def test_end_of_sequence_counts_as_a_token_and_has_no_text(router, tokenizer):
    token_ids = [*tokenizer.encode("dog"), 0]
    body = router.complete(prompt=token_ids, max_tokens=50).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["text"] == "dog"
    assert body["usage"]["completion_tokens"] == len(token_ids)


def test_ignore_eos_is_passed_on(router):
    body = router.complete(prompt=[70, 0], max_tokens=9, ignore_eos=True).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("prompt", ["fox", ["fox"], [70, 71], [[70, 71]]])
def test_forms_of_a_prompt(router, target, tokenizer, prompt):
    assert router.complete(prompt=prompt).status_code == 200
    expected = tokenizer.encode("fox") if "fox" in (prompt, prompt[0]) else [70, 71]
    assert list(target.requests[-1].prompt_token_ids) == expected


def test_defaults_reach_the_target(router, target):
    router.complete(prompt="fox", seed=3)
    request = target.requests[-1]
    assert (request.max_tokens, request.seed, request.ignore_eos) == (16, 3, False)
    assert not request.HasField("num_speculative_tokens")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 0, 1, 0)
    assert sampling.repetition_penalty == 1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0, 0)


def test_sampling_reaches_the_target(router, target):
    router.complete(
        prompt="fox",
        temperature=0.7,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={"5": 1.5, "9": -100},
        num_speculative_tokens=0,
        outrider={"output_token_ms": 40},
    )
    request = target.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.7, 0, 0.9, 0.1)
    assert sampling.repetition_penalty == 1.2
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 0.5)
    assert list(sampling.logit_bias_token_ids) == [5, 9]
    assert list(sampling.logit_bias_values) == [1.5, -100]
    assert request.HasField("num_speculative_tokens")
    assert request.num_speculative_tokens == 0
    assert request.output_token_ms == 40


def test_a_drawn_seed_is_told_and_used(router, target):
    responses = [router.complete(prompt="fox") for _ in range(2)]
    seeds = [response.json()["seed"] for response in responses]
    assert seeds[0] != seeds[1]
    assert [request.seed for request in target.requests] == seeds
    assert [response.headers["x-outrider-seed"] for response in responses] == [str(s) for s in seeds]


@pytest.mark.parametrize("tokens_per_reply", [1, 3])
def test_stream_says_what_the_whole_answer_says(router, target, tokenizer, tokens_per_reply):
    prompt = "fox 🦊 and naïve 👩‍👩‍👧 dog"
    target.tokens_per_reply = tokens_per_reply
    num_tokens = len(tokenizer.encode(prompt))
    whole = router.complete(prompt=prompt, max_tokens=num_tokens + 3, seed=1).json()
    events = router.stream(prompt=prompt, max_tokens=num_tokens + 3, seed=1)
    assert events[-1] == "[DONE]"
    assert text_of(events) == whole["choices"][0]["text"]
    assert text_of(events).startswith(prompt)
    assert [event["choices"][0]["finish_reason"] for event in events[:-2]] == [None] * (len(events) - 2)
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert {event["seed"] for event in events[:-1]} == {1}
    assert len({event["id"] for event in events[:-1]}) == 1
    assert all("usage" not in event for event in events[:-1])


def test_an_unfinished_character_at_the_end_becomes_a_replacement(router, tokenizer):
    events = router.stream(prompt="🦊", max_tokens=3)
    assert text_of(events) == "\N{REPLACEMENT CHARACTER}"


def test_usage_of_a_stream_comes_last_and_alone(router):
    events = router.stream(prompt=[70, 71], max_tokens=5, stream_options={"include_usage": True})
    *chunks, usage_chunk, done = events
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage_chunk["choices"] == []
    assert usage_chunk["usage"] == usage(2, 5)


def test_leaving_a_stream_cancels_the_call(router, target):
    target.hang_after = 2
    with router.client.stream("POST", "/v1/completions", json={"prompt": [70], "stream": True}) as response:
        pieces = response.iter_raw()  # forgetting it would close the stream
        assert next(pieces)
    assert target.cancelled.wait(WAIT_S)
    assert_counted(router, "499")


def test_leaving_before_the_answer_cancels_the_call(router, target):
    target.hang_after = 0
    for stream in (False, True):
        target.cancelled.clear()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(router.url + "/v1/completions", json={"prompt": [70], "stream": stream}, timeout=2)
        assert target.cancelled.wait(WAIT_S)
    assert_counted(router, "499", 2)


def assert_counted(router, code: str, times: int = 1) -> None:
    name = f'outrider_requests_total{{code="{code}",model_name="{router.model}"}}'
    assert f"{name} {times}.0" in router.client.get("/metrics").text


def test_a_failure_before_the_first_token_has_a_status(new_router, target):
    router = new_router([target.address], max_pause_seconds=0.1)
    target.fail_after = 0
    for stream in (False, True):
        response = router.complete(prompt="fox", stream=stream)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["error"]["type"] == "unavailable_error"
        assert "going down" not in response.text
        wait_for_health(router)


def test_a_failure_amid_a_stream_is_its_last_event(router, target):
    target.fail_after = 2
    target.failure = (grpc.StatusCode.INTERNAL, "/secret/path.py: traceback")
    events = router.stream(prompt=[70, 71], max_tokens=5)
    assert len(events) == 3
    assert events[-1]["error"]["type"] == "internal_error"
    assert "secret" not in str(events)
    assert router.complete(prompt=[70]).status_code == 500
    assert_counted(router, "500", 2)


def test_the_targets_refusal_keeps_its_words_and_field(router, target):
    target.fail_after = 0
    target.failure = (grpc.StatusCode.INVALID_ARGUMENT, "prompt is odd")
    response = router.complete(prompt="fox")
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "prompt is odd"
    assert response.json()["error"]["param"] == "prompt"


def test_a_full_target_is_503(router, target):
    target.fail_after = 0
    target.failure = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    response = router.complete(prompt="fox")
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "overloaded_error"


def test_a_finish_reason_of_a_newer_worker_is_an_error(router, target):
    target.last_finish_reason = 99
    assert router.complete(prompt="fox", max_tokens=1).status_code == 503


def test_beyond_the_limit_in_flight_requests_are_refused_unread(new_router, target):
    router = new_router([target.address], max_waiting_requests=1)
    target.hang_after = 1
    with router.client.stream("POST", "/v1/completions", json={"prompt": [70], "stream": True}) as response:
        pieces = response.iter_raw()  # forgetting it would close the stream
        next(pieces)
        assert metric(router, "vllm:num_requests_running") == 1
        refused = router.client.post("/v1/completions", content=b"not even JSON")
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["type"] == "overloaded_error"
        assert len(target.requests) == 1
    assert target.cancelled.wait(WAIT_S)
    target.hang_after = None
    assert router.complete(prompt="fox").status_code == 200
    assert metric(router, "vllm:num_requests_running") == 0


def test_metrics_add_up(router):
    router.complete(prompt=[70, 71], max_tokens=5)
    router.stream(prompt=[70], max_tokens=2)
    router.complete(prompt=[])
    assert metric(router, "vllm:prompt_tokens_total") == 3
    assert metric(router, "vllm:generation_tokens_total") == 7
    assert metric(router, "vllm:spec_decode_num_drafts_total") == 7
    assert metric(router, "vllm:spec_decode_num_draft_tokens_total") == 28
    assert metric(router, "vllm:spec_decode_num_accepted_tokens_total") == 21
    assert metric(router, "vllm:time_to_first_token_seconds_count") == 2
    assert metric(router, "vllm:e2e_request_latency_seconds_count") == 2
    assert_counted(router, "200", 2)
    assert_counted(router, "400", 1)


def test_the_official_client(router):
    client = router.openai()
    assert [model.id for model in client.models.list()] == [router.model]
    whole = client.completions.create(model=router.model, prompt="fox 🦊", max_tokens=12, seed=5)
    chunks = list(
        client.completions.create(
            model=router.model,
            prompt="fox 🦊",
            max_tokens=12,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5, "num_speculative_tokens": "auto"},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="fox")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=router.model, prompt="fox", n=129)
    assert caught.value.param == "n"


def test_the_official_client_sees_a_failure_amid_a_stream(new_router, target):
    router = new_router([target.address], max_pause_seconds=0.1)
    target.fail_after = 1
    client = router.openai()
    stream = client.completions.create(model=router.model, prompt="fox", stream=True)
    with pytest.raises(openai.APIError, match="no target worker"):
        list(stream)


def test_token_ids_are_returned_when_asked_for(router, tokenizer):
    prompt = tokenizer.encode("quick 😀 fox")
    body = router.complete(prompt=prompt, max_tokens=len(prompt), return_token_ids=True).json()
    assert body["choices"][0]["token_ids"] == prompt
    events = router.stream(prompt=prompt, max_tokens=len(prompt), return_token_ids=True)
    assert [t for event in events[:-1] for choice in event["choices"] for t in choice["token_ids"]] == prompt
