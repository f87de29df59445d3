"""Tests of a target's KV cache, large or small, of how its requests end, and of the draft workers it may use."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.engine.runner import ModelRunner
from cluster.engine.sequence import FinishReason
from cluster.errors import InvalidRequestError
from cluster.speculation.params import SamplingParams
from tests.background_loop import BackgroundLoop
from tests.waiting import wait_until

from ..engine.invariants import assert_blocks_are_sound
from .loopback import OTHER_SEED, LoopbackDraft, LoopbackTarget
from .requests import MIXED, acceptance, mixed_requests, new_request

EOS = 0
NewRunner = Callable[..., ModelRunner]


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

    def test_an_aborted_request_may_return_with_its_id(self, new_target: Callable[..., LoopbackTarget]) -> None:
        target = new_target([])
        request = new_request(max_tokens=40)
        target.target.submit(request)
        wait_until(lambda: bool(target.outputs(request)))
        target.target.abort(request.request_id)
        again = replace(request, max_tokens=3)
        target.target.submit(again)
        wait_until(lambda: target.outputs(again)[-1].finish_reason is FinishReason.LENGTH)
        target.target.submit(request)
        target.target.abort(request.request_id)
        target.assert_idle()

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
