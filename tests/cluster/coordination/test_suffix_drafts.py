"""Drafts from earlier text next to a drafter's, against a pool whose links and clock are the test's."""

from __future__ import annotations

import itertools

import pytest

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.base import LinkState
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams

from .scripted import LIMITS, VOCAB_SIZE, K, ScriptedLink, ScriptedPool

TEXT = list(range(100, 140))


class Steps:
    """A coordinator with one link, and steps that commit what the test says."""

    def __init__(self, *, is_fixed: bool = True) -> None:
        controller = "fixed" if is_fixed else "goodput"
        config = SpeculationConfig(num_speculative_tokens=K, controller=controller, suffix_bytes=10**6)
        self.pool, self.link = ScriptedPool(), ScriptedLink("draft")
        self.coordinator = Coordinator(self.pool, config, VOCAB_SIZE, LIMITS, self.pool.clock)
        self.pool.happens(self.link, LinkState.UP)
        self.coordinator.begin(())

    def open(self, prompt: list[int], *, k: int | None = None, owner: bytes = b"") -> SpeculativeSequence:
        sequence = SpeculativeSequence(list(prompt), len(prompt), SamplingParams(), NoiseKey(1, 2), k, owner=owner)
        self.coordinator.begin((), [sequence])
        self.link.take_sent()
        return sequence

    def commit(self, sequence: SpeculativeSequence, *tokens: int) -> list[int]:
        """Ends a step that commits `tokens`. Returns the drafts of the next one."""
        before = self.coordinator.begin([sequence])[sequence]
        sequence.token_ids.extend(tokens)
        right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before.token_ids, tokens, strict=False))
        self.coordinator.end([Round(sequence, before, tokens[: 1 + len(list(right))])])
        return list(self.coordinator.begin([sequence])[sequence].token_ids)


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_what_followed_in_an_ended_sequence_is_verified_and_the_drafter_is_asked_for_nothing(steps: Steps) -> None:
    first = steps.open(TEXT)
    steps.coordinator.close(first)
    second = steps.open([7, *TEXT[:10]])
    assert steps.commit(second, *TEXT[10:12]) == TEXT[12 : 12 + K]
    assert steps.link.take_sent() == []
    assert steps.commit(second, 999) == []
    (sent,) = steps.link.take_sent()
    (advance,) = sent.advances.values()
    assert list(advance.token_ids) == [*TEXT[10:12], 999]


def test_nothing_of_another_owner_is_proposed(steps: Steps) -> None:
    first = steps.open(TEXT, owner=b"alice")
    steps.coordinator.close(first)
    assert steps.commit(steps.open([7, *TEXT[:10]], owner=b"bob"), *TEXT[10:12]) == []


def test_a_request_without_drafts_gets_none(steps: Steps) -> None:
    steps.coordinator.close(steps.open(TEXT))
    assert steps.commit(steps.open([7, *TEXT[:10]], k=0), *TEXT[10:12]) == []


def test_drafts_that_are_never_right_are_left_to_the_drafter(steps: Steps) -> None:
    """After the first trials; one in 128 matches is tried again."""
    steps.coordinator.close(steps.open(TEXT))
    sequence = steps.open([7, *TEXT[:10]])
    verified = [bool(steps.commit(sequence, 500 + number, *TEXT[4:12])) for number in range(80)]
    assert all(verified[:8])
    assert not any(verified[-30:])


def test_before_a_step_is_measured_a_match_is_tried_with_one_draft() -> None:
    steps = Steps(is_fixed=False)
    steps.coordinator.close(steps.open(TEXT))
    assert steps.commit(steps.open([7, *TEXT[:10]]), *TEXT[10:12]) == TEXT[12:13]
