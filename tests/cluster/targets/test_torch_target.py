"""The target's tokens do not depend on the drafter: whole rounds between real engines over real streams, in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.engine.runner import ModelRunner
from cluster.speculation.drafts import is_chain
from cluster.speculation.params import SamplingParams
from cluster.speculation.tree import RoundTime, Shape
from cluster.speculation.tree_policy import TreePolicy
from tests.background_loop import BackgroundLoop
from tests.waiting import wait_until

from ..engine.checkpoints import CHECKPOINTS
from .loopback import OTHER_SEED, TARGET_SEED, LoopbackDraft, LoopbackTarget
from .oracle import OracleDraft
from .requests import acceptance, mixed_requests, new_request

NewRunner = Callable[..., ModelRunner]


class TestSameTokens:
    @pytest.mark.parametrize("k", [0, 1, 4, 8])
    def test_with_a_perfect_drafter(
        self,
        k: int | None,
        new_target: Callable[..., LoopbackTarget],
        same_draft: LoopbackDraft,
        expected: dict[int, list[int]],
    ) -> None:
        target, requests = new_target([same_draft]), mixed_requests(k)
        assert target.generate(requests) == list(expected.values())
        drafted, accepted = acceptance(target, requests)
        assert (drafted > 0) == (k > 0)
        assert accepted >= 0.95 * drafted  # near-ties apart
        wait_until(lambda: same_draft.drafter.num_used_blocks == 0)

    @pytest.mark.parametrize("k", [1, 8])
    def test_with_a_poor_drafter(
        self,
        k: int,
        new_target: Callable[..., LoopbackTarget],
        other_draft: LoopbackDraft,
        expected: dict[int, list[int]],
    ) -> None:
        target, requests = new_target([other_draft]), mixed_requests(k)
        assert target.generate(requests) == list(expected.values())
        drafted, accepted = acceptance(target, requests)
        assert 0 <= accepted < drafted
        wait_until(lambda: other_draft.drafter.num_used_blocks == 0)

    def test_with_different_drafters_side_by_side(
        self,
        new_target: Callable[..., LoopbackTarget],
        same_draft: LoopbackDraft,
        other_draft: LoopbackDraft,
        expected: dict[int, list[int]],
    ) -> None:
        target = new_target([same_draft, other_draft])
        requests = [replace(request, num_speculative_tokens=k) for k, request in enumerate(mixed_requests(0))]
        assert target.generate(requests) == list(expected.values())

    @pytest.mark.parametrize("checkpoint", ["qwen2", "gemma3", "phi4, mini"])
    def test_of_another_family(
        self,
        checkpoint: str,
        loop: BackgroundLoop,
        new_runner: NewRunner,
        new_target: Callable[..., LoopbackTarget],
        other_draft: LoopbackDraft,
    ) -> None:
        """Drafted for by itself, and by a Llama."""
        model = CHECKPOINTS[checkpoint]
        expected = new_target([], model=model).generate(mixed_requests(0))
        own_draft = LoopbackDraft(loop, new_runner(8, 128, **model))
        target, requests = new_target([own_draft], model=model), mixed_requests(4)
        assert target.generate(requests) == expected
        drafted, accepted = acceptance(target, requests)
        assert accepted >= 0.95 * drafted > 0
        own_draft.stop()
        assert new_target([other_draft], model=model).generate(mixed_requests(4)) == expected

    def test_when_every_proposal_is_late(
        self, new_target: Callable[..., LoopbackTarget], same_draft: LoopbackDraft, expected: dict[int, list[int]]
    ) -> None:
        target = new_target([same_draft], draft_timeout_ms=1e-3)
        assert target.generate(mixed_requests(4)) == list(expected.values())

    def test_when_blocks_are_scarce(
        self, new_target: Callable[..., LoopbackTarget], same_draft: LoopbackDraft, expected: dict[int, list[int]]
    ) -> None:
        """Room for the longest sequence and hardly more: the others wait for their turn."""
        target = new_target([same_draft], num_blocks=34)
        assert target.generate(mixed_requests(4)) == list(expected.values())

    def test_without_any_draft_worker(
        self, new_target: Callable[..., LoopbackTarget], expected: dict[int, list[int]]
    ) -> None:
        target = new_target([])
        assert target.generate(mixed_requests(4)) == list(expected.values())

    @pytest.mark.parametrize("grace", [None, 0.5])
    def test_when_the_draft_worker_dies_and_comes_back(
        self,
        grace: float | None,
        loop: BackgroundLoop,
        new_runner: NewRunner,
        new_target: Callable[..., LoopbackTarget],
    ) -> None:
        draft = LoopbackDraft(loop, new_runner(8, 128, seed=TARGET_SEED))
        target = new_target([draft])
        request = new_request(SamplingParams(), num_prompt=9, max_tokens=240, seed=3)
        target.target.submit(request)
        wait_until(lambda: acceptance(target, [request])[1] > 0)
        draft.stop(grace)
        target.wait_for_links(0)  # else the link that is lost could be taken for the one that comes back
        wait_until(lambda: target.is_finished(request))
        draft.start()
        target.wait_for_links()
        again = replace(request, request_id="again")
        assert target.generate([again]) == [target.token_ids(request)]
        assert acceptance(target, [again])[1] > 0
        assert target.generate([replace(request, request_id="plain", num_speculative_tokens=0)]) == [
            target.token_ids(request)
        ]
        draft.stop()

    def test_when_a_request_is_moved_with_its_tokens_so_far(
        self, new_target: Callable[..., LoopbackTarget], same_draft: LoopbackDraft, expected: dict[int, list[int]]
    ) -> None:
        target = new_target([same_draft])
        for place, request in enumerate(mixed_requests(4)):
            num_done = len(expected[place]) // 2
            moved = replace(request, token_ids=request.token_ids + expected[place][:num_done])
            assert target.generate([moved]) == [expected[place][num_done:]]

    def test_when_draft_workers_are_taken_away_and_added(
        self,
        new_target: Callable[..., LoopbackTarget],
        same_draft: LoopbackDraft,
        other_draft: LoopbackDraft,
        expected: dict[int, list[int]],
    ) -> None:
        target, requests = new_target([other_draft]), mixed_requests(4)
        for request in requests:
            target.target.submit(request)
        target.follow([same_draft.address, other_draft.address])
        target.wait_for_links(2)
        target.follow([same_draft.address])
        target.wait_for_links(1)
        wait_until(lambda: other_draft.drafter.num_used_blocks == 0)
        wait_until(lambda: all(target.is_finished(request) for request in requests))
        assert [target.token_ids(request) for request in requests] == list(expected.values())


class TestBranches:
    @pytest.mark.parametrize("tree_width", [1, 3])
    @pytest.mark.parametrize("seed", [TARGET_SEED, OTHER_SEED], ids=["perfect drafter", "poor drafter"])
    def test_give_the_same_tokens(
        self,
        seed: int,
        tree_width: int,
        loop: BackgroundLoop,
        new_runner: NewRunner,
        new_target: Callable[..., LoopbackTarget],
        expected: dict[int, list[int]],
    ) -> None:
        draft = LoopbackDraft(loop, new_runner(8, 256, seed=seed), run_ahead_branches=3)
        target, requests = new_target([draft], tree_width=tree_width), mixed_requests(4)
        assert target.generate(requests) == list(expected.values())
        drafted, accepted = acceptance(target, requests)
        assert drafted > 0
        if seed == TARGET_SEED:
            assert accepted >= 0.9 * drafted or tree_width > 1
        assert sum(reading.value for reading in draft.worker.run_ahead.readings()) > 0
        wait_until(lambda: draft.drafter.num_used_blocks == 0)
        draft.stop()


class RandomShapes(TreePolicy):
    """Now this tree, now that, now a chain."""

    def __init__(self) -> None:
        super().__init__(width=3, max_nodes=16)
        self._choose = random.Random(0)

    def shape(self, num_nodes: int, time: Callable[[], RoundTime]) -> Shape | None:
        shape = tuple(self._choose.randrange(-1, node) for node in range(self._choose.randint(0, num_nodes)))
        return None if is_chain(shape) else shape


class TestTrees:
    """Random trees around the truth, whole or wrong, some deeper than can be used; and those of real drafters."""

    @pytest.mark.parametrize(
        ("k", "are_random"), [(k, are_random) for k in (2, 6, 16) for are_random in (False, True)] + [(None, False)]
    )
    def test_of_a_drafter_give_the_same_tokens(
        self,
        are_random: bool,
        k: int | None,
        new_target: Callable[..., LoopbackTarget],
        same_draft: LoopbackDraft,
        other_draft: LoopbackDraft,
        expected: dict[int, list[int]],
    ) -> None:
        for draft in (same_draft, other_draft):
            target, requests = new_target([draft], tree_width=3), mixed_requests(k)
            if are_random:
                target.target._coordinator.planner.trees = RandomShapes()
            assert target.generate(requests) == list(expected.values())
            if k is not None:  # else the controller decides by measured times, and may be right to draft nothing
                drafted, accepted = acceptance(target, requests)
                assert drafted > 0
                assert accepted > 0 or draft is other_draft
            wait_until(lambda draft=draft: draft.drafter.num_used_blocks == 0)

    @pytest.mark.parametrize("k", [1, 6, 16])
    def test_give_the_same_tokens(
        self,
        k: int,
        loop: BackgroundLoop,
        new_runner: NewRunner,
        new_target: Callable[..., LoopbackTarget],
        expected: dict[int, list[int]],
    ) -> None:
        requests = mixed_requests(k)
        truths = [request.token_ids + expected[place] for place, request in enumerate(requests)]
        draft = OracleDraft(loop, new_runner(8, 1, seed=OTHER_SEED), truths)
        target = new_target([draft])
        assert target.generate(requests) == list(expected.values())
        drafted, accepted = acceptance(target, requests)
        assert 0 < accepted < drafted
        draft.stop()

    @pytest.mark.parametrize("checkpoint", ["mistral with a window", "qwen3"])
    def test_give_the_same_tokens_in_another_family_and_a_scarce_cache(
        self, checkpoint: str, loop: BackgroundLoop, new_runner: NewRunner, new_target: Callable[..., LoopbackTarget]
    ) -> None:
        model = CHECKPOINTS[checkpoint]
        expected = new_target([], model=model).generate(mixed_requests(0))
        requests = mixed_requests(16)
        truths = [request.token_ids + tokens for request, tokens in zip(requests, expected, strict=True)]
        draft = OracleDraft(loop, new_runner(8, 1, seed=OTHER_SEED), truths)
        target = new_target([draft], model=model, num_blocks=36)
        assert target.generate(requests) == expected
        assert acceptance(target, requests)[1] > 0
        draft.stop()
