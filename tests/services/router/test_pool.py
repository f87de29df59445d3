"""Tests of a pool whose workers come and go: which are used, awaited, and allowed to answer together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from cluster.errors import UnavailableError
from protos.speculation.v1 import target_pb2
from services.router.targets import replicas as replicas_module
from services.router.targets import traits as traits_module
from services.router.targets.replicas import Replica, ReplicaPool
from tests.waiting import WAIT_S, wait_until

from .conftest import ScriptedTarget
from .test_replicas import answer

NOBODY = "127.0.0.1:9"


class Endpoints:
    """A list of addresses that a test changes."""

    def __init__(self, *targets: ScriptedTarget) -> None:
        self._lists: asyncio.Queue[Sequence[str]] = asyncio.Queue()
        self.become(*targets)

    def become(self, *targets: ScriptedTarget) -> None:
        self._lists.put_nowait([target.address for target in targets])

    async def lists(self) -> AsyncIterator[Sequence[str]]:
        while True:
            yield await self._lists.get()


@contextlib.asynccontextmanager
async def following(endpoints: Endpoints, tokenizer, **settings) -> AsyncIterator[ReplicaPool]:
    async with ReplicaPool(endpoints.lists(), tokenizer.fingerprint(), **settings) as pool:
        yield pool


async def until(condition) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  # whatever it is about has no event
            await asyncio.sleep(0.01)


def addresses(replicas: Sequence[Replica]) -> list[str]:
    return [replica.address for replica in replicas]


def request(max_tokens: int = 3) -> target_pb2.GenerateRequest:
    return target_pb2.GenerateRequest(prompt_token_ids=[70, 71, 72], max_tokens=max_tokens)


def with_traits(target: ScriptedTarget, **traits: str) -> tuple[tuple[str, str], ...]:
    target.description.traits.clear()
    target.description.traits.update(traits)
    return tuple(sorted(traits.items()))


def test_a_new_worker_takes_its_share_within_five_seconds(background, new_target, tokenizer):
    first, second = new_target(), new_target()
    for target in (first, second):
        target.hang_after = 1
        target.description.load.Clear()

    async def run() -> None:
        endpoints = Endpoints(first)
        async with following(endpoints, tokenizer) as pool:
            calls = [asyncio.create_task(answer(pool.choose())) for _ in range(4)]
            await until(lambda: len(first.requests) == 4)
            endpoints.become(first, second)
            async with asyncio.timeout(WAIT_S):
                while len(second.requests) < 4:
                    calls.append(asyncio.create_task(answer(pool.choose())))
                    await asyncio.sleep(0.1)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    background.run(run())


def test_a_worker_that_is_silent_for_a_moment_is_the_last_choice(background, new_target, tokenizer):
    silent, busy = new_target(), new_target()
    busy.description.load.num_running = 50

    async def run() -> None:
        endpoints = Endpoints(silent, busy)
        async with following(endpoints, tokenizer) as pool:
            assert pool.choose().address == silent.address
            silent.describe_delay_s = 60
            await until(lambda: pool.replicas[0].is_silent)
            assert addresses(pool.usable) == [silent.address, busy.address]
            assert pool.choose().address == busy.address
            endpoints.become(silent)
            await until(lambda: addresses(pool.replicas) == [silent.address])
            assert pool.choose().address == silent.address  # rather it than nobody
            with pytest.raises(UnavailableError):  # but not for a request that was just moved
                await pool.wait_for(None, 0.1)
            silent.describe_delay_s = 0
            assert (await pool.wait_for(None, WAIT_S)).address == silent.address

    background.run(run())


def test_a_removed_worker_gets_no_new_calls_and_ends_those_that_run(background, new_target, tokenizer):
    leaving, staying = new_target(), new_target()
    leaving.delay_s = 0.1
    staying.description.load.num_running = 50

    async def run() -> None:
        endpoints = Endpoints(leaving, staying)
        async with following(endpoints, tokenizer) as pool:
            replica = pool.choose()
            assert replica.address == leaving.address
            replies = replica.generate(request(max_tokens=9))
            tokens = (await anext(replies)).token_ids
            endpoints.become(staying)
            await until(lambda: addresses(pool.replicas) == [staying.address])
            assert pool.choose().address == staying.address
            async for reply in replies:
                tokens += reply.token_ids
            assert tokens == [70, 71, 72] * 3
            # Nothing holds on to it any more, and who has chosen it just before is sent elsewhere.
            await until(lambda: replica not in pool._polls)
            await asyncio.sleep(0)
            with pytest.raises(UnavailableError, match="shutting down"):
                await answer(replica)

    background.run(run())


def test_a_removed_worker_that_is_lost_ends_its_calls(background, new_target, tokenizer):
    leaving, staying = new_target(), new_target()
    leaving.hang_after = 1
    staying.description.load.num_running = 50

    async def run() -> None:
        endpoints = Endpoints(leaving, staying)
        async with following(endpoints, tokenizer) as pool:
            replies = pool.choose().generate(request())
            await anext(replies)
            endpoints.become(staying)
            await until(lambda: len(pool.replicas) == 1)
            leaving.description.is_stuck = True
            with pytest.raises(UnavailableError, match="makes no progress"):
                await asyncio.wait_for(anext(replies), WAIT_S)

    background.run(run())


def test_a_worker_may_leave_and_come_back(background, new_target, tokenizer):
    target = new_target()

    async def run() -> None:
        endpoints = Endpoints(target)
        async with following(endpoints, tokenizer) as pool:
            for _ in range(2):
                assert await answer(pool.choose()) == [70, 71, 72]
                endpoints.become()
                await until(lambda: not pool.replicas)
                with pytest.raises(UnavailableError):
                    pool.choose()
                endpoints.become(target)
                await until(lambda: pool.usable)

    background.run(run())


def test_the_router_follows_a_file(background, new_target, new_router, tmp_path):
    first, second = new_target(), new_target()
    path = tmp_path / "targets"
    path.write_text(first.address)
    router = new_router([f"file:{path}"])

    def listed() -> list[str]:
        return [target["address"] for target in router.client.get("/health").json()["targets"]]

    assert listed() == [first.address]
    path.write_text(f"{first.address}\n{second.address}\n")
    wait_until(lambda: listed() == [first.address, second.address])
    path.write_text(f"{second.address}\n")
    wait_until(lambda: listed() == [second.address])
    wait_until(lambda: router.client.get("/health").status_code == 200)
    assert router.complete(prompt=[70, 71], max_tokens=4).status_code == 200
    assert second.requests
    assert not first.requests


def test_waiting_ends_as_soon_as_one_is_usable(background, new_target, tokenizer):
    target = new_target()
    background.run(target.stop())

    async def run() -> None:
        async with following(Endpoints(target), tokenizer) as pool:
            with pytest.raises(UnavailableError):
                await pool.wait_for(None, timeout=0.2)
            waiting = asyncio.create_task(pool.wait_for(None, timeout=WAIT_S))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await target.start()
            assert (await asyncio.wait_for(waiting, WAIT_S)).address == target.address
            assert (await pool.wait_for(None, timeout=0)).address == target.address

    background.run(run())


def test_one_may_wait_for_a_worker_that_answers_alike(background, new_target, tokenizer):
    first, second = new_target(), new_target()
    traits = with_traits(first, weights="a")
    with_traits(second, weights="a")
    second.description.is_draining = True

    async def run() -> None:
        async with following(Endpoints(first, second), tokenizer) as pool:
            await until(lambda: len(pool.usable) == 1)
            assert pool.choose(like=traits).address == first.address
            assert pool.choose().traits == traits
            for like in ((), (("weights", "b"),)):
                with pytest.raises(UnavailableError):
                    pool.choose(like=like)
            first.description.is_draining = True
            await until(lambda: not pool.usable)
            waiting = asyncio.create_task(pool.wait_for(traits, timeout=WAIT_S))
            await asyncio.sleep(0.1)
            second.description.is_draining = False
            assert (await asyncio.wait_for(waiting, WAIT_S)).address == second.address

    background.run(run())


def test_a_worker_whose_answers_would_differ_is_refused_by_name_of_what_differs(background, new_target, new_router):
    first, other = new_target(), new_target()
    with_traits(first, weights="aaaa", dtype="bfloat16", engine="torch 1")
    with_traits(other, weights="bbbb", dtype="float32", engine="torch 1")
    other.describe_delay_s = 0.3
    router = new_router([first.address, other.address])
    used, refused = router.client.get("/health").json()["targets"]
    assert (used["status"], refused["status"]) == ("up", "refused")
    assert refused["problem"] == (
        "its dtype is float32, the pool's is bfloat16; its weights are bbbb, the pool's are aaaa: see "
        "router.allow_different_targets"
    )
    for _ in range(4):
        router.complete(prompt="fox")
    assert not other.requests


def test_a_refusal_advises_how_different_processors_form_one_pool() -> None:
    own = (("dtype", "bfloat16"), ("kernels", "CpuModel, portable"), ("weights", "a"))
    advice = "set OUTRIDER_CPU_ISA=portable and the same target.dtype on every target"
    assert advice in traits_module.difference(
        own, (("dtype", "bfloat16"), ("kernels", "CpuModel, amx"), ("weights", "a"))
    )
    assert advice not in traits_module.difference(
        own, (("dtype", "bfloat16"), ("kernels", "CpuModel, portable"), ("weights", "b"))
    )


def test_different_targets_may_be_allowed(background, new_target, tokenizer):
    first, other = new_target(), new_target()
    traits = with_traits(first, weights="a")
    with_traits(other, weights="b")
    other.description.load.Clear()

    async def run() -> None:
        async with following(Endpoints(first, other), tokenizer, allow_different=True) as pool:
            assert len(pool.usable) == 2
            assert pool.choose().address == other.address
            assert pool.choose(like=traits).address == first.address
            first.description.is_draining = True
            await until(lambda: len(pool.usable) == 1)
            assert pool.choose(like=traits).address == other.address

    background.run(run())


@pytest.mark.parametrize("is_first_silent", [True, False])
def test_a_worker_that_does_not_tell_its_traits_is_used_only_beside_its_like(
    background, new_target, tokenizer, is_first_silent
):
    first, second, third = new_target(), new_target(), new_target()
    for target in (second, third):
        target.describe_delay_s = 0.2
    with_traits(second if is_first_silent else first, weights="a")
    if not is_first_silent:
        with_traits(third, weights="a")

    async def run() -> None:
        async with following(Endpoints(first, second, third), tokenizer) as pool:
            used = [first, third]
            assert addresses(pool.usable) == [target.address for target in used]
            said = "its weights are a, the pool's are unknown" if is_first_silent else "does not report"
            assert said in (pool.replicas[1].problem or "")

    background.run(run())


def test_the_reference_stays_while_its_worker_may_come_back_and_then_passes_on(
    background, new_target, tokenizer, monkeypatch
):
    monkeypatch.setattr(traits_module, "PATIENCE_S", 6.0)
    first, other = new_target(), new_target()
    with_traits(first, weights="a")
    with_traits(other, weights="b")
    other.describe_delay_s = 0.2

    async def run() -> None:
        async with following(Endpoints(first, other), tokenizer) as pool:
            await first.stop()
            await until(lambda: not pool.usable)
            await asyncio.sleep(0.7)
            assert not pool.usable
            await first.start()
            await until(lambda: addresses(pool.usable) == [first.address])
            await first.stop()
            await until(lambda: not pool.usable)
            lost_at = time.monotonic()
            assert (await pool.wait_for(None, timeout=WAIT_S)).address == other.address
            assert time.monotonic() > lost_at + 0.5
            await first.start()
            await until(lambda: "its weights are a, the pool's are b" in (pool.replicas[0].problem or ""))

    background.run(run())


async def waits_for(target: ScriptedTarget, endpoints: Endpoints, pool: ReplicaPool) -> None:
    """A request waits until only `target` is listed, and is for it."""
    waiting = asyncio.create_task(pool.wait_out_change())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    endpoints.become(target)
    await asyncio.wait_for(waiting, WAIT_S)
    assert pool.choose().address == target.address


def test_a_request_waits_for_those_that_take_over(background, new_target, tokenizer):
    old, new = new_target(), new_target()
    with_traits(old, weights="a")
    with_traits(new, weights="b")

    async def run() -> None:
        endpoints = Endpoints(old)
        async with following(endpoints, tokenizer) as pool:
            await until(lambda: len(pool.usable) == 1)
            endpoints.become(old, new)
            await until(lambda: [replica.status for replica in pool.replicas] == ["up", "refused"])
            old.description.is_draining = True
            await until(lambda: not pool.usable)
            await waits_for(new, endpoints, pool)

    background.run(run())


def test_a_request_waits_for_a_while_after_the_last_target_went(background, new_target, tokenizer, monkeypatch):
    old, new = new_target(), new_target()

    async def run() -> None:
        endpoints = Endpoints(old)
        async with following(endpoints, tokenizer) as pool:
            await until(lambda: len(pool.usable) == 1)
            endpoints.become()
            await until(lambda: not pool.replicas)
            await waits_for(new, endpoints, pool)
            monkeypatch.setattr(replicas_module, "_CHANGE_TIMEOUT_S", 0.5)
            endpoints.become()
            await until(lambda: not pool.replicas)
            await asyncio.wait_for(pool.wait_out_change(), WAIT_S)
            assert not pool.usable

    background.run(run())


def test_a_request_waits_for_the_first_poll_of_a_new_target(background, new_target, tokenizer):
    target = new_target()
    target.describe_delay_s = 0.3

    async def run() -> None:
        endpoints = Endpoints()
        async with following(endpoints, tokenizer) as pool:
            endpoints.become(target)
            await until(lambda: bool(pool.replicas))
            assert not pool.usable
            await asyncio.wait_for(pool.wait_out_change(), WAIT_S)
            assert pool.choose().address == target.address

    background.run(run())


def test_a_request_does_not_wait_for_a_first_target(background, new_target, tokenizer):
    target = new_target()

    async def run() -> None:
        await target.stop()
        async with following(Endpoints(target), tokenizer) as pool:
            await asyncio.wait_for(pool.wait_out_change(), 2.0)
            assert not pool.usable

    background.run(run())


def test_the_reference_passes_on_at_once_when_nobody_is_listed_who_has_it(background, new_target, tokenizer):
    first, other = new_target(), new_target()
    with_traits(first, weights="a")
    with_traits(other, weights="b")
    other.describe_delay_s = 0.2

    async def run() -> None:
        endpoints = Endpoints(first, other)
        async with following(endpoints, tokenizer) as pool:
            assert addresses(pool.usable) == [first.address]
            endpoints.become(other)
            await until(lambda: addresses(pool.usable) == [other.address])

    background.run(run())


def test_the_only_worker_may_come_back_as_another(background, new_target, tokenizer):
    target = new_target()
    with_traits(target, weights="a")

    async def run() -> None:
        async with following(Endpoints(target), tokenizer) as pool:
            traits = with_traits(target, weights="b")
            await until(lambda: pool.choose().traits == traits)

    background.run(run())


def test_health_tells_what_each_target_is_about(background, new_target, new_router):
    up, draining, stuck = new_target(), new_target(), new_target()
    draining.description.is_draining = True
    draining.description.advertised_address = "gateway:7000"
    draining.description.wire_version = 2
    stuck.description.is_stuck = True
    router = new_router([up.address, draining.address, stuck.address, NOBODY])
    targets = router.client.get("/health").json()["targets"]
    assert [target["status"] for target in targets] == ["up", "draining", "stuck", "down"]
    assert (targets[1]["advertised_address"], targets[1]["wire_version"]) == ("gateway:7000", 2)
    assert [target["problem"] for target in targets[:3]] == [None, "is draining", "its engine makes no progress"]


def test_the_router_lives_where_no_target_does(new_router):
    router = new_router([NOBODY])
    assert router.client.get("/health").status_code == 503
    live = router.client.get("/health/live")
    assert (live.status_code, live.json()) == (200, {"status": "ok"})
