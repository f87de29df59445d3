"""A step that fails on the device ends its requests, with an error; the target goes on, unless steps go on failing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from cluster.engine.batch import Segment, Unread
from cluster.errors import InternalError
from cluster.targets.base import GenerationRequest
from tests.waiting import wait_until

from .loopback import LoopbackDraft, LoopbackTarget
from .requests import mixed_requests, new_request


class Failing:
    """Replaces a runner's `run`: the steps whose numbers are in `steps` fail."""

    def __init__(self, target: LoopbackTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        target.generate([new_request(k=0)])  # by then it has tried what steps take
        self.steps: Sequence[int] = ()
        self._run = target.runner.run
        self._num_steps = 0
        monkeypatch.setattr(target.runner, "run", self)

    def __call__(self, segments: Sequence[Segment], unread: Unread | None = None) -> torch.Tensor:
        self._num_steps += 1
        if self._num_steps - 1 in self.steps:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")
        return self._run(segments, unread)


def has_failed(target: LoopbackTarget, request: GenerationRequest) -> bool:
    outputs = target.outputs(request)
    return bool(outputs) and outputs[-1].error is not None


@pytest.mark.parametrize("k", [0, 4])
def test_its_requests_fail_and_the_next_are_answered(
    k: int,
    new_target: Callable[..., LoopbackTarget],
    same_draft: LoopbackDraft,
    expected: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = new_target([same_draft])
    failing = Failing(target, monkeypatch)
    failing.steps = [4]
    lost = [new_request(num_prompt=n, max_tokens=40, seed=n, k=k) for n in (3, 6)]
    for request in lost:
        target.target.submit(request)
    wait_until(lambda: any(has_failed(target, request) for request in lost))
    failed = next(target.outputs(request)[-1] for request in lost if has_failed(target, request))
    assert isinstance(failed.error, InternalError)
    assert failed.error.message == ("the step that computed it failed: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert target.generate(mixed_requests(k)) == list(expected.values())
    assert target.readings()["outrider_failed_steps"] == 1


def test_one_that_always_fails_ends_the_loop(
    new_target: Callable[..., LoopbackTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = new_target([])
    failing = Failing(target, monkeypatch)
    failing.steps = range(10**6)
    for seed in range(3):
        target.target.submit(new_request(seed=seed, k=0))
        if seed < 2:
            wait_until(lambda: target.readings()["outrider_failed_steps"] == seed + 1)  # noqa: B023
    wait_until(lambda: target.target.error is not None)
    assert isinstance(target.target.error, torch.OutOfMemoryError)
    target.target.error = None  # for the fixture, which looks for what was left
    target.target._release(*target.target._generations.values())


def test_an_error_of_ours_ends_the_loop_at_once(
    new_target: Callable[..., LoopbackTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = new_target([])
    target.generate([new_request(k=0)])

    def broken(segments: Sequence[Segment]) -> torch.Tensor:
        raise AssertionError("broken")

    monkeypatch.setattr(target.runner, "run", broken)
    target.target.submit(new_request(k=0))
    wait_until(lambda: target.target.error is not None)
    assert target.readings()["outrider_failed_steps"] == 0
    target.target.error = None
    target.target._release(*target.target._generations.values())
