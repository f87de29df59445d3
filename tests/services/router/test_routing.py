"""Requests reach the target that has computed their prompt's beginning, through the whole router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import httpx
import pytest

from protos.speculation.v1 import target_pb2
from services.router.metrics import RouterMetrics
from services.router.operators.admin import create_admin_app
from services.router.operators.routing import RoutingCall
from services.router.operators.switch import SpeculationSwitch
from services.router.targets.affinity import RoutingKey
from services.router.targets.prefixes import CHUNK_TOKENS
from services.router.targets.replica import Replica
from services.router.targets.replicas import ReplicaPool

from .conftest import Router, ScriptedTarget

ONE = "1" * 64


@pytest.fixture
def targets(new_target) -> list[ScriptedTarget]:
    """Four idle targets with room for the prompts of a test."""
    made = [new_target() for _ in range(4)]
    for target in made:
        target.description.load.CopyFrom(type(target.description.load)(num_blocks=1000))
        target.description.block_size, target.description.caches_prefixes = 16, True
        target.description.model.max_model_len = 20 * CHUNK_TOKENS
        target.description.adapters["a"] = ONE
    return made


def prompt_of(number: int) -> list[int]:
    return [1 + (7 * number + place * (number + 1)) % 200 for place in range(10 * CHUNK_TOKENS)]


def ask(router: Router, prompt: list[int], headers: dict[str, str] | None = None, **fields) -> None:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    router.client.post("/v1/completions", json=body, headers=headers).raise_for_status()


def answered_by(targets: list[ScriptedTarget]) -> tuple[int, target_pb2.GenerateRequest]:
    """Returns the index of the target with the latest request, and the request; forgets it."""
    ((index, target),) = [(index, target) for index, target in enumerate(targets) if target.requests]
    return index, target.requests.pop()


def test_the_next_turn_goes_where_the_prompt_was_computed(new_router, targets) -> None:
    """That happens by chance once in 4^8."""
    router = new_router([target.address for target in targets])
    for number in range(8):
        ask(router, prompt_of(number), prompt_cache_key=f"first {number}")
        index, first = answered_by(targets)
        ask(router, [*prompt_of(number), 5, 6], prompt_cache_key=f"second {number}")
        again, second = answered_by(targets)
        assert again == index
        assert (len(first.conversation), len(second.conversation)) == (16, 16)
        assert first.conversation != second.conversation


@pytest.mark.parametrize(
    "other", [{"cache_salt": "x"}, {"model": "a"}, {"prompt_cache_key": "other"}, {"session": "other"}]
)
def test_what_shares_no_prefix_or_has_another_name_is_another_conversation(new_router, targets, other) -> None:
    router = new_router([target.address for target in targets])
    conversations = []
    for fields in ({}, other):
        given = dict(fields)
        headers = {"x-session-id": session} if (session := given.pop("session", None)) else {}
        ask(router, prompt_of(0), headers, **given)
        conversations.append(answered_by(targets)[1].conversation)
    assert conversations[0] != conversations[1]


@pytest.mark.parametrize("other", [{"cache_salt": "x"}, {"model": "a"}])
def test_salts_and_adapters_share_no_prefix(new_router, targets, other) -> None:
    """Each of the eight prompts is as likely to go to any target; that all stay is chance in 1 of 4^8."""
    router = new_router([target.address for target in targets])
    stayed = []
    for number in range(8):
        ask(router, prompt_of(number), prompt_cache_key=f"first {number}")
        index, _ = answered_by(targets)
        ask(router, prompt_of(number), prompt_cache_key=f"second {number}", **other)
        stayed.append(answered_by(targets)[0] == index)
    assert not all(stayed)


def test_least_loaded_routing_does_not_look_at_prompts(new_router, targets) -> None:
    router = new_router([target.address for target in targets], routing="least-loaded")
    indices = set()
    for number in range(16):
        ask(router, prompt_of(0), prompt_cache_key=f"{number}")
        indices.add(answered_by(targets)[0])
    assert len(indices) > 1


def test_operators_switch_the_choice_while_the_router_runs(background) -> None:
    async def call(routing: str) -> tuple[int, dict[str, str]]:
        pool = ReplicaPool(no_addresses(), "")
        metrics = RouterMetrics("m")
        app = create_admin_app(SpeculationSwitch(100, metrics), metrics, routing=RoutingCall(pool))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            answer = await client.put("/admin/routing", json={"routing": routing})
            assert (await client.get("/admin/routing")).json() == {"routing": pool.routing}
            return answer.status_code, answer.json()

    assert background.run(call("least-loaded")) == (200, {"routing": "least-loaded"})
    status, answer = background.run(call("fastest"))
    assert (status, answer["error"]["param"]) == (400, "routing")


async def no_addresses() -> AsyncIterator[Sequence[str]]:
    yield ()


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**32, 2**70])
@pytest.mark.parametrize("fields", [{}, {"echo": True}])
def test_a_token_outside_the_vocabulary_is_refused(router, token_id, fields) -> None:
    answer = router.client.post("/v1/completions", json={"prompt": [1, token_id], "max_tokens": 1, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


class TestReplica:
    """A replica's memory of its calls."""

    def test_prompts_count_as_queued_until_their_first_token_and_as_cached_from_then_on(
        self, background, target, tokenizer
    ) -> None:
        target.description.caches_prefixes, target.description.block_size = True, 16
        target.description.load.num_blocks = 1000
        prompt = prompt_of(1)
        key = RoutingKey.of(prompt, opening="", name="", root="")
        request = target_pb2.GenerateRequest(prompt_token_ids=prompt, max_tokens=4)

        async def run() -> None:
            replica = Replica(target.address, tokenizer.fingerprint())
            await replica.poll()
            target.delay_s = 0.2
            calls = [replica.generate(request, key) for _ in range(2)]
            first = [asyncio.ensure_future(anext(call)) for call in calls]
            await asyncio.sleep(0)
            assert (replica.queued_tokens, len(replica.prefixes)) == (2 * len(prompt), 0)
            await first[0]
            await first[1]
            assert (replica.queued_tokens, len(replica.prefixes)) == (0, len(prompt) // CHUNK_TOKENS)
            for call in calls:
                await call.aclose()
            target.description.epoch += 1
            await replica.poll()
            assert len(replica.prefixes) == 0, "it was restarted"
            target.fail_after, target.failure = 0, (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            call = replica.generate(request, key)
            with pytest.raises(Exception, match="full"):
                await anext(call)
            assert (replica.queued_tokens, len(replica.prefixes), replica.num_in_flight) == (0, 0, 0)
            target.fail_after, target.delay_s = None, 5.0
            call = replica.generate(request, key)
            waiting = asyncio.ensure_future(anext(call))
            await asyncio.sleep(0)
            assert replica.queued_tokens == len(prompt)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert (replica.queued_tokens, replica.num_in_flight) == (0, 0)
            await replica.close()

        background.run(run())
