"""A prompt goes where it makes the least work; routers that have not seen its beginning agree on the target."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from services.router.api.completions import CompletionRequest
from services.router.chat.endpoint import ChatRequest
from services.router.targets.affinity import RoutingKey, least_load, least_work
from services.router.targets.prefixes import CHUNK_TOKENS, CachedPrefixes, chunk_hashes
from services.router.targets.replica import Replica

ADDRESSES = [f"10.0.0.{index}:7000" for index in range(8)]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a prefix?"}]
NEXT_MESSAGES = [*MESSAGES, {"role": "assistant", "content": "A start."}, {"role": "user", "content": "And a suffix?"}]


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    """Replicas that nobody polls, each with room for a thousand chunks."""

    async def make() -> list[Replica]:
        made = [Replica(address, "") for address in ADDRESSES]
        for replica in made:
            replica.prefixes.limit(1000)
        return made

    async def close() -> None:
        for replica in made:
            await replica.close()

    with asyncio.Runner() as runner:
        made = runner.run(make())
        yield made
        runner.run(close())


def key(name: str = "a", token_ids: list[int] | None = None) -> RoutingKey:
    return RoutingKey.of(token_ids or [], opening="", name=name, root="")


def key_of(request: ChatRequest | CompletionRequest, token_ids: list[int]) -> RoutingKey:
    return RoutingKey.of(
        token_ids, opening=request.opening, name=request.prompt_cache_key, root=request.cache_salt or ""
    )


class TestChoice:
    @pytest.mark.parametrize("choose", [least_work, least_load])
    def test_conversations_are_spread_evenly_over_idle_targets(self, replicas, choose) -> None:
        found = Counter(choose(key(str(index)), replicas) for index in range(800))
        assert len(found) == len(replicas)
        assert max(found.values()) < 150  # 100 expected, with a standard deviation of 9: 5 of these

    @pytest.mark.parametrize("choose", [least_work, least_load])
    def test_the_order_in_which_targets_are_listed_does_not_matter(self, replicas, choose) -> None:
        for index in range(20):
            assert choose(key(str(index)), replicas) is choose(key(str(index)), replicas[::-1])

    def test_a_target_that_leaves_moves_only_its_own_conversations(self, replicas) -> None:
        keys = [key(str(index)) for index in range(200)]
        before = [least_work(each, replicas) for each in keys]
        gone = replicas[3]
        rest = [replica for replica in replicas if replica is not gone]
        after = [least_work(each, rest) for each in keys]
        moved = {old for old, new in zip(before, after, strict=True) if old is not new}
        assert moved == {gone}
        assert len({new for old, new in zip(before, after, strict=True) if old is gone}) > 3

    def test_a_prompt_goes_where_its_beginning_was_sent_although_others_have_less_to_do(self, replicas) -> None:
        opening = list(range(2000))
        holder = replicas[5]
        holder.prefixes.add(key(token_ids=opening).hashes)
        for replica in replicas:
            replica.num_in_flight = 4
        holder.num_in_flight = 6
        for name in "abcdefgh":
            assert least_work(key(name, [*opening, 1, 2, 3]), replicas) is holder
            assert least_load(key(name, [*opening, 1, 2, 3]), replicas) is not holder
        assert {least_work(key(name, [7, *opening]), replicas) for name in "abcdefgh"} != {holder}

    def test_no_target_gets_far_more_sequences_than_the_mean(self, replicas) -> None:
        opening = list(range(2000))
        for number in range(80):
            chosen = least_work(key(str(number), opening), replicas)
            assert chosen is not None
            chosen.prefixes.add(key(token_ids=opening).hashes)
            chosen.num_in_flight += 1
            loads = [replica.num_in_flight for replica in replicas]
            assert max(loads) <= 1.5 * (number + 1) / len(replicas) + 1

    def test_prompts_that_wait_at_a_target_count(self, replicas) -> None:
        for replica in replicas[1:]:
            replica.queued_tokens = 1000
        assert {least_work(key(str(index), [1] * 70), replicas) for index in range(20)} == {replicas[0]}

    @pytest.mark.parametrize("choose", [least_work, least_load])
    def test_no_target_is_chosen_of_none(self, choose) -> None:
        assert choose(key(), []) is None


class TestCachedPrefixes:
    def test_the_longest_beginning_that_was_sent_is_found(self) -> None:
        sent, prompt = CachedPrefixes(100), list(range(1000))
        sent.add(chunk_hashes(prompt, ""))
        assert sent.num_tokens(chunk_hashes(prompt, "")) == 1000 // CHUNK_TOKENS * CHUNK_TOKENS
        assert sent.num_tokens(chunk_hashes([*prompt[:200], 7, *prompt[200:]], "")) == 3 * CHUNK_TOKENS
        assert sent.num_tokens(chunk_hashes([7, *prompt], "")) == 0
        assert sent.num_tokens(chunk_hashes(prompt, "salt")) == 0
        assert sent.num_tokens(chunk_hashes(prompt[: CHUNK_TOKENS - 1], "")) == 0

    def test_what_was_sent_longest_ago_is_forgotten_first_and_its_end_before_its_beginning(self) -> None:
        sent = CachedPrefixes(15)
        prompts = [[number] * 10 * CHUNK_TOKENS for number in range(2)]
        for prompt in prompts:
            sent.add(chunk_hashes(prompt, ""))
        assert [sent.num_tokens(chunk_hashes(prompt, "")) // CHUNK_TOKENS for prompt in prompts] == [5, 10]
        sent.limit(4)
        assert [sent.num_tokens(chunk_hashes(prompt, "")) // CHUNK_TOKENS for prompt in prompts] == [0, 4]

    def test_memory_stays_bounded(self) -> None:
        sent = CachedPrefixes(10**9)
        for start in range(0, 2**17, 1000):
            sent.add(range(start, start + 1000))
        assert len(sent) == 2**16


class TestConversation:
    def test_all_turns_of_a_chat_have_one(self) -> None:
        first = key_of(ChatRequest(messages=MESSAGES), [1, 2])
        second = key_of(ChatRequest(messages=NEXT_MESSAGES), [1, 2, 3])
        assert first.conversation == second.conversation
        other = key_of(ChatRequest(messages=[MESSAGES[0], {"role": "user", "content": "Other"}]), [1, 2])
        assert other.conversation != first.conversation

    def test_a_name_that_the_client_gives_counts_instead_of_the_text(self) -> None:
        named = [key_of(ChatRequest(messages=one, prompt_cache_key="x"), []) for one in (MESSAGES, NEXT_MESSAGES[2:])]
        assert named[0].conversation == named[1].conversation
        assert named[0].conversation != key_of(ChatRequest(messages=MESSAGES), []).conversation

    def test_prompts_of_tokens_share_one_where_they_begin_alike(self) -> None:
        request, long = CompletionRequest(prompt="a"), list(range(300))
        assert key_of(request, long).conversation == key_of(request, [*long, 1, 2]).conversation
        assert key_of(request, long).conversation != key_of(request, [7, *long]).conversation

    def test_a_salt_parts_equal_ones(self) -> None:
        keys = [key_of(ChatRequest(messages=MESSAGES, cache_salt=salt), []) for salt in ("a", "b")]
        assert keys[0].conversation != keys[1].conversation


@pytest.mark.parametrize(("num_characters", "is_in_thread"), [(10, False), (20_000, True)])
def test_a_long_prompt_is_hashed_off_the_event_loop(router, monkeypatch, num_characters, is_in_thread):
    found, make = list[str](), RoutingKey.of

    def noting(*arguments, **options):
        found.append(threading.current_thread().name)
        return make(*arguments, **options)

    monkeypatch.setattr(RoutingKey, "of", noting)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "user": "a" * num_characters}
    router.client.post("/v1/chat/completions", json=body)
    assert [name.startswith("large-work") for name in found] == [is_in_thread]
