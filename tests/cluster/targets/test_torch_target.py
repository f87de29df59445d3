"""The target's tokens do not depend on the drafter: whole rounds between real engines over real streams, in float32."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from cluster.engine.batch import Segment
from cluster.engine.runner import ModelRunner
from cluster.engine.sequence import FinishReason
from cluster.errors import InvalidRequestError
from cluster.speculation.drafts import is_chain
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest
from cluster.speculation.tree import RoundTime, Shape
from cluster.speculation.tree_policy import TreePolicy
from cluster.targets.base import GenerationRequest
from tests.background_loop import BackgroundLoop
from tests.waiting import wait_until

from ..engine.checkpoints import CHECKPOINTS
from ..engine.invariants import assert_blocks_are_sound
from .loopback import LoopbackDraft, LoopbackTarget
from .oracle import OracleDraft

TARGET_SEED, OTHER_SEED = 0, 1
EOS = 0

# (sampling, length of the prompt, max_tokens); more requests than may run at once, prompts longer than a step.
MIXED = [
    (SamplingParams(temperature=0.0), 5, 30),
    (SamplingParams(), 1, 30),
    (SamplingParams(temperature=0.7, top_k=40, top_p=0.9), 40, 25),
    (SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.3), 17, 40),
    (SamplingParams(temperature=1.2, min_p=0.02, presence_penalty=0.5, logit_bias=((7, 2.0),)), 24, 1),
    (SamplingParams(temperature=0.5), 90, 33),
    (SamplingParams(temperature=0.9), 226, 30),  # ends at the models' longest sequence
]

_numbers = itertools.count()


def new_request(
    params: SamplingParams = MIXED[0][0], num_prompt: int = 5, max_tokens: int = 20, *, seed: int = 0, k: int | None = 4
) -> GenerationRequest:
    prompt = np.random.default_rng(num_prompt).integers(1, 512, size=num_prompt).tolist()
    key = NoiseKey.derive(seed, 0)
    name = f"request {next(_numbers)}"
    return GenerationRequest(name, prompt, num_prompt, params, key, max_tokens, True, k)


def mixed_requests(k: int | None) -> list[GenerationRequest]:
    return [new_request(*setting, seed=seed, k=k) for seed, setting in enumerate(MIXED)]


NewRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def same_draft(loop: BackgroundLoop, new_runner: NewRunner) -> Iterator[LoopbackDraft]:
    """The target's own weights: what it proposes is right."""
    draft = LoopbackDraft(loop, new_runner(8, 128, seed=TARGET_SEED))
    yield draft
    draft.stop()


@pytest.fixture(scope="module")
def other_draft(loop: BackgroundLoop, new_runner: NewRunner) -> Iterator[LoopbackDraft]:
    """Other weights: what it proposes is right now and then."""
    draft = LoopbackDraft(loop, new_runner(8, 128, seed=OTHER_SEED))
    yield draft
    draft.stop()


@pytest.fixture
def new_target(loop: BackgroundLoop, new_runner: NewRunner) -> Iterator[Callable[..., LoopbackTarget]]:
    """new_target(drafts, **settings): a target linked to `drafts`; it must leave no block in use."""
    targets: list[LoopbackTarget] = []

    def start(
        drafts: Sequence[LoopbackDraft],
        num_blocks: int = 128,
        model: Mapping[str, Any] = MappingProxyType({"seed": TARGET_SEED}),
        **settings: object,
    ) -> LoopbackTarget:
        runner = new_runner(8, num_blocks, **model)
        target = LoopbackTarget(loop, runner, [draft.address for draft in drafts], **settings)
        targets.append(target)
        target.wait_for_links(len(drafts))
        return target

    yield start
    for target in targets:
        target.assert_idle()
        target.stop()


@pytest.fixture(scope="module")
def expected(new_runner: NewRunner) -> dict[int, list[int]]:
    """The answers to `mixed_requests`, by their place: each alone, one token a step, the whole prefix each time."""
    runner = new_runner(8, 32, seed=TARGET_SEED)
    sampler = Sampler(runner.model.device)
    answers = {}
    for place, request in enumerate(mixed_requests(k=0)):
        tokens = list(request.token_ids)
        for start in range(request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens):
            computed = 0 if start == request.num_prompt_tokens else start - 1
            logits = runner.run([Segment(tokens[computed:], computed, list(range(32)), num_logits=1)])
            sampled = SampleRequest(request.params, request.noise_key, tokens, len(request.token_ids))
            tokens += sampler.sample(logits, [sampled])
        answers[place] = tokens[request.num_prompt_tokens :]
    return answers


def acceptance(target: LoopbackTarget, requests: Sequence[GenerationRequest]) -> tuple[int, int]:
    """(drafted, accepted) over `requests`."""
    outputs = [output for request in requests for output in target.outputs(request)]
    return sum(o.num_draft_tokens for o in outputs), sum(o.num_accepted_tokens for o in outputs)


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

    @pytest.mark.parametrize("checkpoint", ["mistral with a window", "qwen2", "qwen3"])
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
        k: int,
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


class TestEnds:
    def test_outputs_end_with_their_reason_and_count_what_was_accepted(
        self, new_target: Callable[..., LoopbackTarget], same_draft: LoopbackDraft
    ) -> None:
        target, request = new_target([same_draft]), new_request(max_tokens=21)
        target.generate([request])
        outputs = target.outputs(request)
        assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]
        assert sum(len(o.token_ids) for o in outputs) == 21
        for output in outputs:
            assert output.num_accepted_tokens <= output.num_draft_tokens <= request.num_speculative_tokens
            assert len(output.token_ids) <= output.num_accepted_tokens + 1

    @pytest.mark.parametrize("k", [0, 4])
    def test_an_end_of_sequence_token_ends_it_also_inside_a_draft(
        self, k: int, new_target: Callable[..., LoopbackTarget], same_draft: LoopbackDraft
    ) -> None:
        # With this bias the end comes soon, but not at once.
        params = SamplingParams(temperature=1.0, logit_bias=((EOS, 6.0),))
        target = new_target([same_draft])
        requests = [
            replace(new_request(params, num_prompt=4, max_tokens=60, seed=seed, k=k), ignore_eos=False)
            for seed in range(6)
        ]
        for request, tokens in zip(requests, target.generate(requests), strict=True):
            assert tokens.index(EOS) == len(tokens) - 1
            assert target.outputs(request)[-1].finish_reason is FinishReason.STOP

    def test_an_aborted_request_frees_its_blocks_on_both_sides(
        self, new_target: Callable[..., LoopbackTarget], other_draft: LoopbackDraft
    ) -> None:
        target = new_target([other_draft])
        requests = [new_request(num_prompt=6, max_tokens=240, seed=seed) for seed in range(6)]  # two wait
        for request in requests:
            target.target.submit(request)
        wait_until(lambda: any(len(target.outputs(request)) > 3 for request in requests))
        assert other_draft.drafter.num_used_blocks > 0
        for request in requests:
            target.target.abort(request.request_id)
        target.target.abort("nobody")
        target.assert_idle()
        wait_until(lambda: other_draft.drafter.num_used_blocks == 0)
        assert other_draft.worker.num_sequences == 0
        after = new_request(max_tokens=3)
        assert len(target.generate([after])[0]) == 3

    def test_a_request_that_can_never_run_is_refused(self, new_target: Callable[..., LoopbackTarget]) -> None:
        target = new_target([], num_blocks=4)
        with pytest.raises(InvalidRequestError, match="KV blocks") as caught:
            target.target.submit(new_request(num_prompt=10, max_tokens=23, k=4))  # 33 tokens in blocks of 8
        assert caught.value.param == "max_tokens"
        assert len(target.generate([new_request(num_prompt=10, max_tokens=22, k=4)])[0]) == 22


class TestMemory:
    @pytest.mark.parametrize("is_drafted_for", [True, False], ids=["drafts", "no drafts"])
    def test_200_requests_in_a_tiny_cache_finish_by_preemption_with_the_same_tokens(
        self, is_drafted_for: bool, new_target: Callable[..., LoopbackTarget], same_draft: LoopbackDraft
    ) -> None:
        """16 blocks of 8 tokens for 8 sequences of up to 96; the large cache holds 8 of the longest."""
        choose = random.Random(0)
        requests = [
            new_request(
                choose.choice([setting[0] for setting in MIXED]),
                num_prompt=choose.randint(1, 60),
                max_tokens=choose.randint(1, 36),
                seed=seed,
                k=choose.randint(0, 6),
            )
            for seed in range(200)
        ]
        drafts = [same_draft] if is_drafted_for else []
        large, tiny = (new_target(drafts, num_blocks=n, max_num_seqs=8) for n in (96, 16))
        again = [replace(request, request_id=f"again {request.request_id}") for request in requests]
        assert tiny.generate(again) == large.generate(requests)
        assert large.readings()["vllm:num_preemptions"] == 0
        assert tiny.readings()["vllm:num_preemptions"] >= 10
        for target in (large, tiny):
            target.assert_idle()
            assert_blocks_are_sound(target.runner.blocks, [])
        readings = tiny.readings()
        print({name: readings[name] for name in readings if "kv_" in name or "prefix" in name or "preempt" in name})
        refused = [r.value for r in tiny.target.readings() if r.name == "outrider_sequences_refused"]
        assert not any(refused)  # a preempted sequence takes no more room on its draft than it had
        wait_until(lambda: same_draft.drafter.num_used_blocks == 0)

    def test_preempted_requests_can_be_aborted(
        self, new_target: Callable[..., LoopbackTarget], same_draft: LoopbackDraft
    ) -> None:
        target = new_target([same_draft], num_blocks=32)
        requests = [new_request(num_prompt=20 + seed, max_tokens=200, seed=seed) for seed in range(4)]
        for request in requests:
            target.target.submit(request)
        wait_until(lambda: target.target.load().num_waiting > 0 and target.readings()["vllm:num_preemptions"] > 0)
        for request in requests:
            target.target.abort(request.request_id)
        target.assert_idle()
        wait_until(lambda: same_draft.worker.num_sequences == 0)
        assert same_draft.drafter.num_used_blocks == 0

    def test_a_prompt_that_was_seen_is_not_computed_again_and_gives_the_same_tokens(
        self,
        new_target: Callable[..., LoopbackTarget],
        same_draft: LoopbackDraft,
        expected: dict[int, list[int]],
    ) -> None:
        target = new_target([same_draft])
        for _ in range(2):
            assert target.generate(mixed_requests(4)) == list(expected.values())
        readings = target.readings()
        num_prompt_tokens = sum(len(request.token_ids) for request in mixed_requests(4))
        assert readings["vllm:prefix_cache_queries"] == 2 * num_prompt_tokens
        # Full blocks of 8 of each prompt, its last token apart.
        assert readings["vllm:prefix_cache_hits"] >= sum(
            (len(request.token_ids) - 1) // 8 * 8 for request in mixed_requests(4)
        )
        assert readings["outrider_kv_blocks_used"] == 0
        assert readings["outrider_kv_blocks_cached"] > 0

    def test_the_next_turn_of_a_conversation_finds_the_answer_before_it(
        self, new_target: Callable[..., LoopbackTarget], same_draft: LoopbackDraft
    ) -> None:
        target, first = new_target([same_draft]), new_request(num_prompt=21, max_tokens=20)
        (answer,) = target.generate([first])
        token_ids = [*first.token_ids, *answer, 5, 6, 7]
        next_turn = replace(first, request_id="next turn", token_ids=token_ids, num_prompt_tokens=len(token_ids))
        (answer,) = target.generate([next_turn])
        assert target.readings()["vllm:prefix_cache_hits"] == 40
        fresh = new_target([])
        assert fresh.generate([next_turn]) == [answer]

    def test_choices_of_one_prompt_share_it(self, new_target: Callable[..., LoopbackTarget]) -> None:
        target = new_target([], num_blocks=64)
        requests = [new_request(SamplingParams(), num_prompt=50, max_tokens=30, seed=seed) for seed in range(4)]
        first = target.generate(requests[:1])
        assert first + target.generate(requests[1:]) == new_target([]).generate(requests)
        assert target.readings()["vllm:prefix_cache_hits"] == 3 * 48


class TestPairs:
    def test_a_draft_worker_with_another_tokenizer_is_not_used(
        self, loop: BackgroundLoop, new_runner: NewRunner, same_draft: LoopbackDraft, caplog: pytest.LogCaptureFixture
    ) -> None:
        stranger = LoopbackDraft(loop, new_runner(8, 32, seed=OTHER_SEED), fingerprint="another tokenizer")
        target = LoopbackTarget(loop, new_runner(8, 128), [stranger.address, same_draft.address])
        wait_until(lambda: "another tokenizer" in caplog.text)
        target.wait_for_links(1)
        assert len(target.generate([new_request()])[0]) == 20
        assert stranger.worker.num_sequences == 0
        assert "the same tokenizer" in caplog.text
        assert "Traceback" not in caplog.text  # one line that says what to do
        target.stop()
        stranger.stop()

    def test_a_draft_with_a_smaller_vocabulary_is_used_as_far_as_it_goes(
        self, loop: BackgroundLoop, new_runner: NewRunner, new_target: Callable[..., LoopbackTarget]
    ) -> None:
        """The tokenizer is the same, the padding is not: the target may well choose tokens the draft lacks."""
        draft = LoopbackDraft(loop, new_runner(8, 128, seed=OTHER_SEED, vocab_size=448))
        prompt = [index * 14 for index in range(30)]
        requests = [
            replace(new_request(SamplingParams(), num_prompt=30, seed=seed), token_ids=prompt) for seed in range(4)
        ]
        plain = [
            replace(request, request_id=f"plain {request.request_id}", num_speculative_tokens=0) for request in requests
        ]
        target = new_target([draft])
        answers = target.generate(requests)
        assert max(map(max, answers)) >= 448
        assert answers == target.generate(plain)
        assert acceptance(target, requests)[0] > 0
        assert draft.worker.error is None
        draft.stop()
