"""Sequences whose grammars take long do not decode in every step; all others do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cluster.constraints import UNCONSTRAINED, Constraints
from cluster.targets import grammar_turns
from cluster.targets.base import TargetModel
from cluster.targets.grammar_turns import postpone_slow
from cluster.targets.token_generator import Generation

from .loopback import LoopbackDraft, LoopbackTarget
from .requests import mixed_requests, new_request

MODEL = TargetModel("model", "float32", 64, ())
BUDGET = grammar_turns._SECONDS_PER_STEP


def generation(seconds: float | None) -> Generation:
    """Returns a generation whose last masks took `seconds`; None: it has no constraint."""
    constraints = UNCONSTRAINED if seconds is None else Constraints(min_tokens=1)
    found = Generation.of(replace(new_request(k=0), constraints=constraints), MODEL, 0)
    if found.constraint is not None and seconds is not None:
        found.constraint.seconds = seconds
    return found


def steps_of(running: Sequence[Generation], seconds: float, num_steps: int) -> list[int]:
    """Returns the number of steps in which each of `running` decodes, if its masks take `seconds`."""
    counts = [0] * len(running)
    for _ in range(num_steps):
        waiting = postpone_slow(running)
        for index, each in enumerate(running):
            if each in waiting:
                continue
            counts[index] += 1
            if each.constraint is not None:
                each.constraint.seconds += seconds
    return counts


def test_slow_masks_take_their_share_of_the_steps() -> None:
    running = [generation(None), generation(10 * BUDGET), generation(10 * BUDGET)]
    plain, *slow = steps_of(running, 10 * BUDGET, 1000)
    assert plain == 1000
    assert sum(slow) * 10 * BUDGET == pytest.approx(1000 * BUDGET, rel=0.15)
    assert min(slow) > 0


def test_fast_masks_and_sequences_that_harm_no_others_wait_for_nothing() -> None:
    assert steps_of([generation(None), generation(0.1 * BUDGET)], 0.1 * BUDGET, 9) == [9, 9]
    assert steps_of([generation(9 * BUDGET), generation(9 * BUDGET)], 9 * BUDGET, 9) == [9, 9]


def test_an_answer_stays_the_same(
    new_target: Callable[..., LoopbackTarget],
    same_draft: LoopbackDraft,
    expected: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_turns, "_SECONDS_PER_STEP", 1e-5)
    target = new_target([same_draft])
    slow = [replace(request, constraints=Constraints(min_tokens=20)) for request in mixed_requests(4)]
    answers = target.generate([*slow, *mixed_requests(4)])
    assert dict(enumerate(answers[: len(slow)])) == expected
    assert dict(enumerate(answers[len(slow) :])) == expected
