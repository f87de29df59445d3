"""A conversation keeps its target, whichever router chooses, while the target is about as loaded as the others."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from services.router.api.completions import CompletionRequest
from services.router.chat.endpoint import ChatRequest
from services.router.targets.affinity import ConversationKey
from services.router.targets.replica import Replica

ADDRESSES = [f"10.0.0.{index}:7000" for index in range(8)]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a prefix?"}]
NEXT_MESSAGES = [*MESSAGES, {"role": "assistant", "content": "A start."}, {"role": "user", "content": "And a suffix?"}]


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    """Replicas that nobody polls."""

    async def make() -> list[Replica]:
        return [Replica(address, "") for address in ADDRESSES]

    async def close() -> None:
        for replica in made:
            await replica.close()

    with asyncio.Runner() as runner:
        made = runner.run(make())
        yield made
        runner.run(close())


def key(name: str = "a", *, later: bool = False) -> ConversationKey:
    return ConversationKey.of([], opening="", name=name, salt="", has_earlier_turns=later)


def key_of(request: ChatRequest | CompletionRequest, token_ids: list[int]) -> ConversationKey:
    return ConversationKey.of(
        token_ids,
        opening=request.opening,
        name=request.prompt_cache_key,
        salt=request.cache_salt or "",
        has_earlier_turns=request.has_earlier_turns,
    )


def test_conversations_are_spread_evenly_over_idle_targets(replicas: list[Replica]) -> None:
    found = Counter(key(str(index)).preferred(replicas) for index in range(800))
    assert len(found) == len(replicas)
    assert max(found.values()) < 150  # 100 expected, with a standard deviation of 9: 5 of these


def test_the_order_in_which_targets_are_listed_does_not_matter(replicas: list[Replica]) -> None:
    for index in range(20):
        assert key(str(index)).preferred(replicas) is key(str(index)).preferred(replicas[::-1])


def test_a_target_that_leaves_moves_only_its_own_conversations(replicas: list[Replica]) -> None:
    keys = [key(str(index)) for index in range(200)]
    before = [each.preferred(replicas) for each in keys]
    gone = replicas[3]
    rest = [replica for replica in replicas if replica is not gone]
    after = [each.preferred(rest) for each in keys]
    moved = {old for old, new in zip(before, after, strict=True) if old is not new}
    assert moved == {gone}
    assert len({new for old, new in zip(before, after, strict=True) if old is gone}) > 3


def test_the_least_loaded_target_is_chosen_and_a_later_turn_may_wait_for_one_sequence(
    replicas: list[Replica],
) -> None:
    own = key().preferred(replicas)
    assert own is not None
    own.num_in_flight = 1
    assert key().preferred(replicas) is not own
    assert key(later=True).preferred(replicas) is own
    own.num_in_flight = 2
    assert key(later=True).preferred(replicas) is not own
    assert key().preferred([]) is None


def test_all_turns_of_a_chat_have_one_key() -> None:
    first = key_of(ChatRequest(messages=MESSAGES), [1, 2])
    second = key_of(ChatRequest(messages=NEXT_MESSAGES), [1, 2, 3])
    assert first.digest == second.digest
    assert (first.has_earlier_turns, second.has_earlier_turns) == (False, True)
    other = key_of(ChatRequest(messages=[MESSAGES[0], {"role": "user", "content": "Other"}]), [1, 2])
    assert other.digest != first.digest


def test_a_name_that_the_client_gives_counts_instead_of_the_text() -> None:
    named = [key_of(ChatRequest(messages=one, prompt_cache_key="x"), []) for one in (MESSAGES, NEXT_MESSAGES[2:])]
    assert named[0].digest == named[1].digest
    assert named[0].digest != key_of(ChatRequest(messages=MESSAGES), []).digest


def test_prompts_of_tokens_share_a_key_where_they_begin_alike() -> None:
    request, long = CompletionRequest(prompt="a"), list(range(300))
    assert key_of(request, long).digest == key_of(request, [*long, 1, 2]).digest
    assert key_of(request, long).digest != key_of(request, [7, *long]).digest
    assert key_of(request, long).has_earlier_turns
    assert not key_of(request, long[:200]).has_earlier_turns
    named = CompletionRequest(prompt="a", prompt_cache_key="x")
    assert key_of(named, long).has_earlier_turns, "a name must not take from a prompt what it has without"
    assert not key_of(named, long[:200]).has_earlier_turns


def test_a_salt_parts_equal_conversations() -> None:
    keys = [key_of(ChatRequest(messages=MESSAGES, cache_salt=salt), []) for salt in ("a", "b")]
    assert keys[0].digest != keys[1].digest


@pytest.mark.parametrize(("num_characters", "is_in_thread"), [(10, False), (20_000, True)])
def test_a_long_opening_is_hashed_off_the_event_loop(router, monkeypatch, num_characters, is_in_thread):
    found, make = list[str](), ConversationKey.of

    def noting(*arguments, **options):
        found.append(threading.current_thread().name)
        return make(*arguments, **options)

    monkeypatch.setattr(ConversationKey, "of", noting)
    messages = [{"role": "user", "content": "a" * num_characters}]
    router.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert [name.startswith("large-work") for name in found] == [is_in_thread]
