"""Tests of the PyTorch target's log-probabilities, constraints and priorities.

Prompts are computed in chunks, under preemption and in batches with other requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cluster.constraints import Constraints
from cluster.engine.batch import Segment
from cluster.engine.runner import ModelRunner
from cluster.errors import InvalidRequestError
from cluster.logprobs import TokenLogprobs
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationRequest
from tests.waiting import wait_until

from .loopback import LoopbackDraft, LoopbackTarget
from .requests import mixed_requests, new_request

NewTarget = Callable[..., LoopbackTarget]


def told(target: LoopbackTarget, request: GenerationRequest) -> tuple[TokenLogprobs, TokenLogprobs]:
    """Returns the log-probabilities of the prompt and of the generated tokens."""
    prompt, generated = TokenLogprobs(request.num_prompt_logprobs or 0), TokenLogprobs(request.num_logprobs or 0)
    for output in target.outputs(request):
        if output.prompt_logprobs is not None:
            prompt.extend(output.prompt_logprobs)
        if output.logprobs is not None:
            assert len(output.logprobs) == len(output.token_ids)
            generated.extend(output.logprobs)
    return prompt, generated


def expected_logprobs(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    """After each of `token_ids`: computed in one step, which must be there for it alone."""
    table = runner.blocks.allocate(runner.blocks.num_blocks_for(len(token_ids)))
    assert table is not None
    logits = runner.run([Segment(token_ids, 0, table, num_logits=len(token_ids))])
    runner.blocks.free(table)
    return logits.log_softmax(-1)


def assert_right(target: LoopbackTarget, request: GenerationRequest) -> None:
    prompt, generated = told(target, request)
    tokens = [*request.token_ids, *target.token_ids(request)]
    expected = expected_logprobs(target.runner, tokens)
    assert len(prompt) == request.num_prompt_tokens - 1
    for index, logprob in enumerate([*prompt.logprobs, *generated.logprobs]):
        assert logprob == pytest.approx(expected[index, tokens[index + 1]].item(), abs=1e-4)
    for index in range(len(generated)):
        values = expected[request.num_prompt_tokens - 1 + index].topk(3).values.tolist()
        assert [value for _, value in generated.top(index)] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("k", [0, 4])
def test_of_prompts_in_chunks_and_answers(
    new_target: NewTarget, same_draft: LoopbackDraft, k: int, expected: dict[int, list[int]]
) -> None:
    """Prompts of up to 226 tokens are computed in steps of 24, all at the same time."""
    target = new_target([same_draft])
    requests = [replace(request, num_logprobs=3, num_prompt_logprobs=2) for request in mixed_requests(k)]
    assert target.generate(requests) == list(expected.values())
    for request in requests:
        assert_right(target, request)


def test_each_prompt_token_is_told_once_whatever_is_preempted(
    new_target: NewTarget, new_runner: Callable[..., ModelRunner]
) -> None:
    target = new_target([], num_blocks=20)
    requests = [
        replace(new_request(num_prompt=60, max_tokens=60, seed=seed, k=0), num_logprobs=3, num_prompt_logprobs=0)
        for seed in range(4)
    ]
    target.generate(requests)
    preempted = {r.name: r.value for r in target.target.readings()}["vllm:num_preemptions"]
    assert preempted > 0
    for request in requests:
        assert_right(target, request)


def test_scoring_reads_no_cached_prompt(new_target: NewTarget) -> None:
    target = new_target([])
    request = new_request(num_prompt=50, max_tokens=1, k=0)
    target.generate([request])
    again = replace(request, request_id="again", num_prompt_logprobs=0, num_logprobs=3)
    target.generate([again])
    assert_right(target, again)


def test_a_salt_keeps_caches_apart(new_target: NewTarget) -> None:
    target = new_target([])

    def hits() -> float:
        return {r.name: r.value for r in target.target.readings()}["vllm:prefix_cache_hits"]

    request = new_request(num_prompt=50, max_tokens=1, k=0)
    answers = []
    for number, (salt, expected_hits) in enumerate([("", 0), ("", 48), ("a", 48), ("b", 48), ("a", 96)]):
        answers += target.generate([replace(request, request_id=f"salted {number}", cache_salt=salt)])
        assert hits() == expected_hits
    assert len({tuple(answer) for answer in answers}) == 1


def test_on_the_drafter_too(new_target: NewTarget, other_draft: LoopbackDraft) -> None:
    target = new_target([other_draft])

    def hits() -> int:
        return other_draft._runner.blocks.num_hit_tokens

    request = new_request(num_prompt=53, max_tokens=6, k=2)
    gained = []
    for number, salt in enumerate(("a", "b", "a", "b")):
        before = hits()
        target.generate([replace(request, request_id=f"salted draft {number}", cache_salt=salt)])
        wait_until(lambda: other_draft.worker.num_sequences == 0)
        gained.append(hits() - before)
    assert gained[:2] == [0, 0]
    assert min(gained[2:]) >= 48


def test_constraints_that_leave_nothing_end_one_request_alone(new_target: NewTarget) -> None:
    target = new_target([])
    stuck = replace(
        new_request(SamplingParams(), max_tokens=5, k=0),
        constraints=Constraints(allowed_token_ids=(7,), bad_words=((7, 7),)),
    )
    fine = new_request(max_tokens=5, k=0)
    target.target.submit(stuck)
    (answer,) = target.generate([fine])
    assert len(answer) == 5
    outputs = target.outputs(stuck)
    assert [token for output in outputs for token in output.token_ids] == [7]
    assert isinstance(outputs[-1].error, InvalidRequestError)


def test_stop_tokens_end_it_even_where_the_models_own_are_ignored(new_target: NewTarget) -> None:
    target = new_target([])
    plain = new_request(SamplingParams(), max_tokens=30, k=0)
    (whole,) = target.generate([plain])
    stop = whole[10]
    stopped = replace(plain, request_id="stopped", stop_token_ids=frozenset({stop}))
    (answer,) = target.generate([stopped])
    assert answer == whole[: whole.index(stop) + 1]
    late = replace(stopped, request_id="late", constraints=Constraints(min_tokens=20))
    (answer,) = target.generate([late])
    assert stop not in answer[:20]


def test_of_those_that_wait_the_lowest_priority_goes_first(new_target: NewTarget) -> None:
    target = new_target([], max_num_seqs=1)
    first = new_request(num_prompt=5, max_tokens=200, k=0)
    target.target.submit(first)
    wait_until(lambda: bool(target.outputs(first)))
    others = [replace(new_request(max_tokens=2, k=0), priority=priority) for priority in (5, 0, -1, 5)]
    target.generate(others)
    wait_until(lambda: target.is_finished(first))
    began = list(target._outputs)  # in the order of their first outputs
    assert began == [first.request_id, *(others[index].request_id for index in (2, 1, 0, 3))]
