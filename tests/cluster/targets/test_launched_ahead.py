"""Steps that are launched before the choices of the previous step are read give the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from cluster.errors import InternalError
from cluster.speculation.params import SamplingParams
from cluster.targets.step_loop import ReadChoices
from cluster.targets.token_generator import Scheduled
from tests.waiting import wait_until

from .loopback import LoopbackDraft, LoopbackTarget
from .requests import acceptance, mixed_requests, new_request

NewTarget = Callable[..., LoopbackTarget]


class Launches:
    """Observes the steps of a target: counts the inputs that were unread when a step was launched."""

    def __init__(self, target: LoopbackTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_unread = self.num_inputs = 0
        self.fails_to_read = False
        self._launch = target.target._launch
        monkeypatch.setattr(target.target, "_launch", self)

    def __call__(self, step: Sequence[Scheduled]) -> ReadChoices:
        unread = [part.has_unread_input for part in step]
        self.num_unread += sum(unread)
        self.num_inputs += len(unread)
        read = self._launch(step)

        def read_or_fail() -> list[int]:
            if self.fails_to_read:
                self.fails_to_read = False
                raise torch.OutOfMemoryError("CUDA out of memory")
            return read()

        return read_or_fail


def without_penalties(k: int | None = 0) -> list[int]:
    """Indices of the mixed requests that have no penalties."""
    return [place for place, request in enumerate(mixed_requests(k)) if not request.params.has_penalty]


class TestSameTokens:
    def test_of_prompts_in_chunks_and_of_answers_of_all_lengths(
        self, new_target: NewTarget, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = new_target([], launches_ahead=True)
        launches = Launches(target, monkeypatch)
        places, requests = without_penalties(), mixed_requests(k=0)
        assert target.generate([requests[place] for place in places]) == [expected[place] for place in places]
        num_tokens = sum(len(expected[place]) for place in places)
        assert launches.num_unread >= 0.9 * (num_tokens - len(places))

    def test_with_neighbours_that_need_the_host(
        self, new_target: NewTarget, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = new_target([], launches_ahead=True, max_num_seqs=8)
        launches = Launches(target, monkeypatch)
        scored = new_request(SamplingParams(), num_prompt=9, max_tokens=12, seed=5, k=0)
        scored = replace(scored, num_logprobs=2)
        requests = [*mixed_requests(k=0), scored]
        assert target.generate(requests)[:-1] == list(expected.values())
        assert 0 < launches.num_unread < launches.num_inputs
        assert sum(len(output.logprobs or ()) for output in target.outputs(scored)) == 12

    def test_when_blocks_are_scarce(self, new_target: NewTarget) -> None:
        """Preempts sequences whose last token is unread."""
        requests = [new_request(SamplingParams(), num_prompt=5, max_tokens=60, seed=seed, k=0) for seed in range(4)]
        expected = new_target([]).generate(requests)
        target = new_target([], num_blocks=20, launches_ahead=True)
        assert target.generate(requests) == expected
        assert target.readings()["vllm:num_preemptions"] > 0

    @pytest.mark.parametrize("place", [0, 5])
    def test_up_to_a_stop_token(self, place: int, new_target: NewTarget, expected: dict[int, list[int]]) -> None:
        """The step after the stop token is dropped, for this request alone."""
        target = new_target([], launches_ahead=True)
        stop = expected[place][12]
        length = expected[place].index(stop) + 1
        requests = [mixed_requests(k=0)[other] for other in without_penalties()]
        index = without_penalties().index(place)
        requests[index] = replace(requests[index], stop_token_ids=frozenset({stop}))
        answers = target.generate(requests)
        assert answers.pop(index) == expected[place][:length]
        assert answers == [expected[other] for other in without_penalties() if other != place]

    def test_while_other_requests_are_aborted(self, new_target: NewTarget, expected: dict[int, list[int]]) -> None:
        target = new_target([], launches_ahead=True, max_num_seqs=8)
        requests = [mixed_requests(k=0)[place] for place in without_penalties()]
        left = [new_request(SamplingParams(), num_prompt=n, max_tokens=200, seed=n, k=0) for n in (3, 30)]
        for request in [*left, *requests]:
            target.target.submit(request)
        for request in left:
            wait_until(partial(target.outputs, request))
            target.target.abort(request.request_id)
        wait_until(lambda: all(target.is_finished(request) for request in requests))
        assert [target.token_ids(request) for request in requests] == [expected[place] for place in without_penalties()]

    def test_a_step_of_aborted_requests_is_forgotten(self, new_target: NewTarget) -> None:
        """Otherwise the time until the next request would count as the time of that step."""
        target = new_target([], launches_ahead=True)
        left = new_request(SamplingParams(), num_prompt=5, max_tokens=200, seed=1, k=0)
        target.target.submit(left)
        wait_until(lambda: len(target.outputs(left)) > 3)
        target.target.abort(left.request_id)
        wait_until(lambda: target.target.load().num_running == 0)
        wait_until(lambda: target.target._launched_ahead is None)

    @pytest.mark.parametrize("k", [4, None])
    def test_when_drafts_come_and_go(
        self,
        k: int | None,
        new_target: NewTarget,
        same_draft: LoopbackDraft,
        expected: dict[int, list[int]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        target = new_target([same_draft], launches_ahead=True)
        launches = Launches(target, monkeypatch)
        requests = mixed_requests(k)
        for request in requests:
            target.target.submit(request)
        wait_until(lambda: acceptance(target, requests)[0] > 0)
        target.follow([])
        target.wait_for_links(0)
        num_drafted = acceptance(target, requests)[0]
        wait_until(lambda: all(target.is_finished(request) for request in requests))
        assert [target.token_ids(request) for request in requests] == list(expected.values())
        assert num_drafted > 0
        places, again = without_penalties(), mixed_requests(k)
        assert target.generate([again[place] for place in places]) == [expected[place] for place in places]
        assert launches.num_unread > 0


def test_a_step_whose_choices_cannot_be_read_fails_its_requests_alone(
    new_target: NewTarget, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = new_target([], launches_ahead=True)
    target.generate([new_request(k=0)])
    launches = Launches(target, monkeypatch)
    lost = new_request(num_prompt=6, max_tokens=200, k=0)
    target.target.submit(lost)
    wait_until(lambda: launches.num_unread > 0)
    launches.fails_to_read = True
    wait_until(lambda: target.outputs(lost)[-1].error is not None)
    assert isinstance(target.outputs(lost)[-1].error, InternalError)
    places, requests = without_penalties(), mixed_requests(k=0)
    assert target.generate([requests[place] for place in places]) == [expected[place] for place in places]
    assert target.readings()["outrider_failed_steps"] == 1
