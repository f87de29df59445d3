"""Prompts that are held at once are bounded, and a request's choices wait in the router rather than at targets."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest

from services.router.targets.prompt_budget import StartWindow
from tests.waiting import WAIT_S, wait_until

from .conftest import Router, ScriptedTarget


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tokens of a request wait at targets."""
    monkeypatch.setattr("services.router.api.endpoint.StartWindow", lambda: StartWindow(6))


def test_requests_beyond_the_budget_wait_for_others_to_end(
    new_router: Callable[..., Router], target: ScriptedTarget
) -> None:
    router = new_router([target.address], max_waiting_tokens=10)
    too_large = router.complete(prompt=[[70] * 6, [71] * 5], max_tokens=1)
    assert (too_large.status_code, too_large.json()["error"]["param"]) == (400, "prompt")
    assert not target.requests
    assert router.complete(prompt=[70] * 10, n=5, max_tokens=1).status_code == 200  # its choices share it
    target.hang_after = 1
    with router.client.stream("POST", "/v1/completions", json={"prompt": [70] * 6, "stream": True}) as streamed:
        pieces = streamed.iter_raw()  # forgetting it would close the stream
        assert next(pieces)
        refused = router.complete(prompt=[70] * 5)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["type"] == "overloaded_error"
        with contextlib.suppress(httpx.ReadTimeout):
            router.client.post("/v1/completions", json={"prompt": [70] * 4}, timeout=0.3)  # this one fits
    target.hang_after = None
    wait_until(lambda: router.complete(prompt=[70] * 10, max_tokens=1).status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_whatever_a_request_comes_to_its_prompts_are_given_back(
    new_router: Callable[..., Router], target: ScriptedTarget, stream: bool
) -> None:
    router = new_router([target.address], max_waiting_tokens=10)
    prompt = [70] * 8
    for fields in ({"max_tokens": 10**6}, {"num_speculative_tokens": 10**3}, {"model": "none"}, {"prompt": [10**6]}):
        assert router.complete(**({"prompt": prompt, "stream": stream} | fields)).status_code in (400, 404)
    target.fail_after, target.failure = 1, (grpc.StatusCode.INTERNAL, "secret")
    router.complete(prompt=prompt, stream=stream)
    target.fail_after = None
    wait_until(lambda: router.complete(prompt=prompt, max_tokens=1).status_code == 200)


def test_choices_begin_as_those_before_have_their_first_token(
    small_window: None, router: Router, target: ScriptedTarget
) -> None:
    target.hang_after = 0
    payload = {"prompt": [[70, 71], [80, 81]], "n": 3, "max_tokens": 4, "return_token_ids": True}
    with pytest.raises(httpx.ReadTimeout):
        router.client.post("/v1/completions", json=payload, timeout=2)
    assert [request.choice_index for request in target.requests] == [0, 1, 2]
    wait_until(lambda: target.num_cancelled == 3)
    target.requests.clear()
    target.hang_after = None
    choices = router.complete(**payload).json()["choices"]
    assert [request.choice_index for request in target.requests] == list(range(6))
    expected = [[70, 71, 70, 71], [71, 70, 71, 70], [70, 71, 70, 71], [81, 80, 81, 80], [80, 81] * 2, [81, 80] * 2]
    assert [choice["token_ids"] for choice in choices] == expected
    assert [choice["index"] for choice in choices] == list(range(6))


def test_a_prompt_beyond_the_window_goes_alone(small_window: None, router: Router, target: ScriptedTarget) -> None:
    target.hang_after = 0
    with pytest.raises(httpx.ReadTimeout):
        router.client.post("/v1/completions", json={"prompt": [70] * 9, "n": 2}, timeout=2)
    assert len(target.requests) == 1


def test_a_full_target_hands_on_to_another(new_target, new_router: Callable[..., Router]) -> None:
    full, free = new_target(), new_target()
    full.description.load.num_running = full.description.load.num_waiting = 0
    full.fail_after, full.failure = 0, (grpc.StatusCode.RESOURCE_EXHAUSTED, "sequences of 9 tokens wait")
    router = new_router([full.address, free.address])
    for _ in range(5):
        assert router.complete(prompt=[70], max_tokens=2).status_code == 200
    assert full.requests
    assert len(free.requests) == 5
    free.fail_after, free.failure = full.fail_after, full.failure
    refused = router.complete(prompt=[70], max_tokens=2)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "sequences of" not in refused.text
    assert len(full.requests) + len(free.requests) >= 7
    assert router.client.get("/health").status_code == 200


def test_once_an_answer_has_begun_a_full_target_is_waited_for(
    small_window: None, new_target, new_router: Callable[..., Router]
) -> None:
    target = new_target()
    router = new_router([target.address])
    target.fail_after, target.failing_choice = 0, 4
    target.failure = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(router.complete, prompt=[70, 71], n=6, max_tokens=2)
        wait_until(lambda: sum(request.choice_index == 4 for request in target.requests) > 1)
        assert not asked.done()
        target.fail_after = None
        assert asked.result().status_code == 200


def test_whoever_leaves_the_window_lets_others_in() -> None:
    async def run() -> None:
        window, random_numbers, inside, most = StartWindow(10), random.Random(3), 0, 0

        async def choose(size: int) -> None:
            nonlocal inside, most
            async with window.place(size) as place:
                inside += size
                most = max(most, inside if inside != size else 0)
                try:
                    await asyncio.sleep(random_numbers.random() / 100)
                finally:
                    inside -= size
                if random_numbers.random() < 0.5:
                    place.begin()
                    place.begin()

        tasks = [asyncio.create_task(choose(random_numbers.randrange(1, 14))) for _ in range(200)]
        for _ in range(20):
            await asyncio.sleep(0.005)
            random_numbers.choice(tasks).cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
        assert 0 < most <= 10
        async with asyncio.timeout(WAIT_S), window.place(10):
            pass

    asyncio.run(run())
