"""How many tokens of a prompt a draft should read: the choice by acceptance and by cost, with simulated rounds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from cluster.config.simulation import SimulationConfig
from cluster.drafters.read_tokens import NUM_SINKS
from cluster.drafters.simulated import SimulatedDrafter
from cluster.drafting.context_tuning import ContextTuning
from cluster.drafting.worker import DraftWorker
from cluster.engine.limits import StepLimits
from cluster.simulator.turns import VirtualTime

from .scripted import Link

NUM_TOKENS, ROUNDS, DEPTH, SEQUENCES = 5000, 60, 3, 200
ROUND_SECONDS = 0.02 / 8  # of 8 sequences


def choices(
    acceptance: Mapping[int | None, float],
    prompt_seconds: float = 0.0,
    read_seconds: float = 0.0,
    num_tokens: int = NUM_TOKENS,
    max_model_len: int = 10**6,
) -> Counter[int | None]:
    """Returns the choices of the last half of many sequences, whose prompts and read tokens take seconds per token."""
    dice, chosen = random.Random(0), Counter[int | None]()
    tuning = ContextTuning(max_model_len, lambda number: number * prompt_seconds)
    for index in range(SEQUENCES):
        use = tuning.choose(num_tokens, ROUND_SECONDS if index else 0.0)
        if 2 * index >= SEQUENCES:
            chosen[use.context_tokens] += 1
        num_read = num_tokens if use.context_tokens is None else NUM_SINKS + use.context_tokens
        use.was_admitted(num_tokens, num_tokens - num_read)
        for answered in range(ROUNDS):
            is_right = [dice.random() < acceptance[use.context_tokens] for _ in range(DEPTH)]
            num_accepted = (*is_right, False).index(False)
            tuning.observe_outcome(use, DEPTH, min(DEPTH, num_accepted + 1), num_accepted)
            num_others = dice.randrange(4, 12)
            held = num_read + answered + num_others * 500
            seconds = 0.003 + 1e-5 * num_others + read_seconds * held
            tuning.observe_step(num_others, held, seconds * dice.uniform(0.95, 1.05))
            use.num_steps += DEPTH
        tuning.observe_end(use)
    return chosen


def share(chosen: Counter[int | None], choice: int | None) -> float:
    return chosen[choice] / chosen.total()


def same(acceptance: float) -> dict[int | None, float]:
    return dict.fromkeys((128, 512, 2048, 8192, None), acceptance)


def test_without_a_difference_in_acceptance_few_tokens_are_read() -> None:
    assert share(choices(same(0.7), prompt_seconds=2e-5, read_seconds=5e-8), 128) > 0.9


@pytest.mark.parametrize("costs", [(2e-5, 0.0), (0.0, 5e-8)])
def test_more_tokens_are_read_if_they_raise_the_acceptance_by_more_than_they_cost(costs: tuple[float, float]) -> None:
    acceptance = same(0.4) | {2048: 0.8, None: 0.8}
    assert share(choices(acceptance, *costs), 2048) > 0.9


@pytest.mark.parametrize(("prompt_seconds", "read_seconds"), [(1e-4, 0.0), (0.0, 1e-6)])
def test_tokens_that_cost_more_than_they_gain_are_not_read(prompt_seconds: float, read_seconds: float) -> None:
    acceptance = same(0.8) | {128: 0.7}
    chosen = choices(acceptance, prompt_seconds, read_seconds)
    assert share(chosen, 128) > 0.85
    assert share(choices(acceptance), 128) < 0.1


def test_each_choice_is_tried_now_and_then() -> None:
    chosen = choices(same(0.7), prompt_seconds=2e-5)
    assert set(chosen) == {128, 512, 2048, None}
    assert 0.03 < 1 - share(chosen, 128) < 0.1


def test_short_prompts_are_read_whole() -> None:
    assert set(choices(same(0.7), prompt_seconds=1e-3, num_tokens=255)) == {None}


def test_a_prompt_that_is_longer_than_the_models_context_is_never_read_whole() -> None:
    assert set(choices(same(0.7), max_model_len=2050)) == {128, 512}


def test_cached_prompts_count_as_read_whole() -> None:
    """With a prefix in the cache the drafter reads all tokens, whatever was chosen."""
    tuning = ContextTuning(10**6, lambda number: 1e-5 * number)
    for _ in range(40):
        use = tuning.choose(NUM_TOKENS, ROUND_SECONDS)
        use.was_admitted(NUM_TOKENS, 0)
        assert use.context_tokens is None
        for _ in range(ROUNDS):
            tuning.observe_outcome(use, DEPTH, DEPTH, DEPTH)
        tuning.observe_end(use)
    assert tuning.choose(NUM_TOKENS, ROUND_SECONDS).context_tokens == 128  # untried numbers are assumed as good


def test_the_choices_are_readings() -> None:
    tuning = ContextTuning(10**6, lambda number: 1e-5 * number)
    tuning.choose(NUM_TOKENS, ROUND_SECONDS)
    tuning.choose(100, ROUND_SECONDS)
    assert {(r.labels["prompt_tokens"], r.value) for r in tuning.readings()} == {("8191", 128), ("127", 0)}


class TestWorker:
    """A draft worker whose simulated drafter has `context_tokens: auto`."""

    def setup_method(self) -> None:
        self.clock = VirtualTime()
        simulation = SimulationConfig(draft_step_ms=((1, 1.0), (2, 1.1)))
        self.drafter = SimulatedDrafter(simulation, 1000, StepLimits(1000, 64, 512, 0.05), self.clock, "auto")
        self.worker = DraftWorker(self.drafter, clock=self.clock.now)
        self.link = Link(self.worker)

    @property
    def numbers_read(self) -> list[int]:
        return [s.num_committed - s.num_skipped for s in self.drafter._uncomputed]

    def test_the_first_sequences_get_every_choice(self) -> None:
        self.link.open(*range(8), length=600)
        self.worker.step()
        assert sorted(self.numbers_read) == [NUM_SINKS + 128] * 4 + [600] * 4

    def test_a_step_that_begins_again_is_not_timed(self) -> None:
        self.link.open(7, length=2000)
        while not self.link.replies.qsize():
            self.worker.step()
        num_read = self.numbers_read[0]
        while self.numbers_read[0] >= num_read:
            num_read, sequence = self.numbers_read[0], next(iter(self.drafter._uncomputed))
            self.link.advance(7, sequence.base, *[1] * 4)
            seconds = self.worker._links[self.link.number].step_seconds
            self.worker.step()
        assert self.numbers_read[0] == NUM_SINKS + 128
        assert self.drafter.num_step_rows == NUM_SINKS + 128
        assert self.worker._links[self.link.number].step_seconds == seconds
