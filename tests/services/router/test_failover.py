"""Tests of failover: another target continues with the same tokens, and the router gives up if none can."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.waiting import wait_until

from .conftest import usage


def moved(router) -> dict[str, float]:
    """How many sequences were moved, by reason."""
    counts = {}
    for line in router.client.get("/metrics").text.splitlines():
        if line.startswith("outrider_requests_moved_total"):
            counts[line.partition('reason="')[2].partition('"')[0]] = float(line.rpartition(" ")[2])
    return counts


def settle(background) -> None:
    """Lets replies that were sent arrive."""
    background.run(asyncio.sleep(1.0))


def running(targets):
    """The target that has a request and has not been stopped."""
    (busy,) = [target for target in targets if target.requests and target._server is not None]
    return busy


@pytest.fixture
def pair(new_target, new_router):
    """Two targets and a router for both. The first is idle, so it gets the first request."""
    first, second = new_target(), new_target()
    first.description.load.num_running = first.description.load.num_waiting = 0
    return first, second, new_router([first.address, second.address])


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_another_target_goes_on_with_the_tokens_there_are(background, pair, num_tokens, is_streamed):
    first, second, router = pair
    first.hang_after = num_tokens
    fields = {"prompt": [70, 71], "max_tokens": 6, "seed": 5, "return_token_ids": True, "presence_penalty": 0.5}
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(router.complete, stream=is_streamed, **fields)
        wait_until(lambda: first.requests)
        settle(background)
        background.run(first.stop())
        response = asked.result()
    (request,) = second.requests
    (before,) = first.requests
    assert list(request.prompt_token_ids) == [70, 71, *[70, 71, 70][:num_tokens]]
    assert request.num_generated_tokens == num_tokens
    assert (request.seed, request.max_tokens, request.sampling) == (5, 6, before.sampling)
    if is_streamed:
        events = router._events(response)
        assert [token for event in events[:-1] for token in event["choices"][0]["token_ids"]] == [70, 71] * 3
    else:
        assert response.json()["choices"][0]["token_ids"] == [70, 71] * 3
        assert response.json()["usage"] == usage(2, 6)
    assert moved(router) == {"lost": 1}


def test_every_choice_is_moved_by_itself(background, pair):
    first, second, router = pair
    first.hang_after = 1
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(router.complete, prompt=[70, 71, 72], max_tokens=3, n=3, seed=1, return_token_ids=True)
        wait_until(lambda: len(first.requests) + len(second.requests) == 3)
        settle(background)
        num_there = len(first.requests)
        background.run(first.stop())
        choices = asked.result().json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [[70, 71, 72], [71, 72, 70], [72, 70, 71]]
    assert moved(router) == {"lost": num_there}
    assert num_there > 1


def test_a_stop_string_may_begin_at_one_target_and_end_at_another(background, pair, tokenizer):
    first, second, router = pair
    prompt = tokenizer.encode("quick brown fox")
    fields = {"prompt": prompt, "max_tokens": len(prompt), "stop": ["wn f"], "return_token_ids": True}
    whole = router.complete(**fields).json()["choices"][0]
    assert whole["text"] == "quick bro"
    first.requests.clear()
    second.requests.clear()
    first.hang_after = len(whole["token_ids"]) - 1
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(router.complete, **fields)
        wait_until(lambda: first.requests)
        settle(background)
        background.run(first.stop())
        assert asked.result().json()["choices"][0] == whole
    assert second.requests[0].num_generated_tokens == len(whole["token_ids"]) - 1


def test_a_draining_target_hands_its_requests_over(pair):
    first, second, router = pair
    first.fail_after, first.failure = 2, (grpc.StatusCode.UNAVAILABLE, "shutting down")
    answer = router.complete(prompt=[70], max_tokens=4, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == [70] * 4
    assert second.requests[0].num_generated_tokens == 2
    assert moved(router) == {"draining": 1}


def test_a_request_that_fails_goes_to_another_target_if_there_is_one(pair):
    first, second, router = pair
    first.fail_after, first.failure = 2, (grpc.StatusCode.INTERNAL, "broken")
    answer = router.complete(prompt=[70], max_tokens=4, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == [70] * 4
    assert moved(router) == {"failed": 1}
    second.fail_after, second.failure = 0, (grpc.StatusCode.INTERNAL, "broken")
    assert router.complete(prompt=[70], max_tokens=4).status_code == 500


def test_a_request_whose_targets_die_twice_before_a_token_takes_no_third(background, new_target, new_router):
    targets = [new_target() for _ in range(3)]
    for target in targets:
        target.hang_after = 0
    router = new_router([target.address for target in targets])
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(router.complete, prompt=[70], max_tokens=4)
        for num_deaths in (1, 2):
            wait_until(lambda num_deaths=num_deaths: sum(len(target.requests) for target in targets) == num_deaths)
            background.run(running(targets).stop())
        response = asked.result()
    assert response.status_code == 500
    assert "2 workers in a row" in response.json()["error"]["message"]
    assert sum(len(target.requests) for target in targets) == 2


def test_deaths_count_only_while_there_is_no_token(background, new_target, new_router):
    targets = [new_target() for _ in range(3)]
    for target in targets:
        target.hang_after = 1
    router = new_router([target.address for target in targets])
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(router.complete, prompt=[70], max_tokens=6, return_token_ids=True)
        for number in (1, 2, 3):
            wait_until(lambda number=number: sum(len(target.requests) for target in targets) == number)
            settle(background)
            victim = running(targets)
            background.run(victim.stop())
        victim.hang_after = None
        background.run(victim.start())
        assert asked.result().json()["choices"][0]["token_ids"] == [70] * 6
    assert moved(router) == {"lost": 3}


def test_a_target_that_was_dead_before_it_was_asked_does_not_count(background, new_target, new_router):
    """Two targets are lost together: for the request that means one death."""
    targets = [new_target() for _ in range(3)]
    for target in targets:
        target.hang_after = 0
    router = new_router([target.address for target in targets])
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(router.complete, prompt=[70], max_tokens=4, return_token_ids=True)
        wait_until(lambda: sum(len(target.requests) for target in targets) == 1)
        settle(background)
        busy = running(targets)
        others = [target for target in targets if target is not busy]
        for target in others:
            target.hang_after = None
        for target in (others[0], busy):
            background.run(target.stop())
        assert asked.result().json()["choices"][0]["token_ids"] == [70] * 4
    assert len(others[1].requests) == 1


def test_nothing_is_taken_from_another_worker_than_the_one_described(pair):
    """Behind a forwarded port, say: its answers may be others."""
    first, second, router = pair
    first.epoch_of_streams = first.description.epoch + 1
    answer = router.complete(prompt=[70], max_tokens=4, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == [70] * 4
    assert len(second.requests) == 1
    assert moved(router) == {"lost": 1}


def test_nobody_waits_longer_than_the_bound(background, new_router, target):
    router = new_router([target.address], max_pause_seconds=0.2)
    target.hang_after = 1
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(router.complete, prompt=[70], max_tokens=4)
        wait_until(lambda: target.requests)
        background.run(target.stop())
        response = asked.result()
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "unavailable_error"


def test_a_request_whose_client_leaves_while_it_waits_is_not_asked_again(background, router, target):
    target.hang_after = 1
    with router.client.stream("POST", "/v1/completions", json={"prompt": [70], "stream": True}) as response:
        next(response.iter_lines())
        background.run(target.stop())
    target.hang_after = None
    background.run(target.start())
    wait_until(lambda: router.client.get("/health").status_code == 200)
    settle(background)
    assert len(target.requests) == 1
