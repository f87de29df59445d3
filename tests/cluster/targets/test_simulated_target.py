"""Simulated engines behind the real step loop, rounds and streams."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from bench.in_process import SIMULATED, Answer, SimulatedCluster
from cluster.config.file import load_config
from cluster.simulated_engines.tokens import token_at
from cluster.speculation.noise import NoiseKey
from tests.waiting import WAIT_S, wait_until

FAST = (
    "simulation.target_step_ms=[[1, 0.5], [64, 1.0]]",
    "simulation.draft_step_ms=[[1, 0.1]]",
    "speculation.draft_timeout_ms=60000",
)
PROMPT_LEN = 32


def cluster(*overrides: str) -> SimulatedCluster:
    return SimulatedCluster(load_config(None, [*SIMULATED, *FAST, *overrides]))


def generate(running: SimulatedCluster, depths: Sequence[int | None], max_tokens: int) -> dict[int, Answer]:
    """One request for each of `depths`, together; the answers by seed."""
    names = [running.submit(max_tokens, num_speculative_tokens=k, prompt_len=PROMPT_LEN) for k in depths]
    running.wait(names, timeout=WAIT_S)
    return {int(name): running.answers[name] for name in names}


@pytest.mark.parametrize("settings", [(), ("speculation.tree_width=3",), ("simulation.round_trip_ms=2",)])
def test_same_tokens_with_and_without_speculation(settings: Sequence[str]) -> None:
    with cluster(*settings) as running:
        together = generate(running, [0, 1, 4, 8, None], max_tokens=60)
        # A step waits for the first drafts of a sequence only if no other sequence can go on without it.
        alone = [generate(running, [k], max_tokens=60) for k in (0, 1, 4, 8)]
        vocab_size = running.target.model.vocab_size
    for answers in (together, *alone):
        for seed, answer in answers.items():
            key = NoiseKey.derive(seed, 0)
            assert answer.token_ids == [token_at(key, PROMPT_LEN + place, vocab_size) for place in range(60)]
    plain, *speculative = (answer for answers in alone for answer in answers.values())
    assert plain.num_draft_tokens == 0
    assert all(answer.num_accepted_tokens > 0 for answer in speculative)


def test_acceptance_is_as_configured() -> None:
    """Fails by chance once in 15,000 times: four standard deviations."""
    # A fixed depth waits for every proposal if drafters do not run ahead.
    with cluster("simulation.acceptance=0.6", "speculation.controller=fixed", "speculation.max_run_ahead=0") as running:
        answers = generate(running, [4] * 8, max_tokens=800).values()
    accepted = sum(answer.num_accepted_tokens for answer in answers)
    expected = 0.6 * (1 - 0.6**4) / (1 - 0.6)  # drafts accepted in a round of 4
    variance = sum((2 * n - 1) * 0.6**n for n in range(1, 5)) - expected**2
    rounds = sum(answer.num_rounds for answer in answers)
    assert accepted / rounds == pytest.approx(
        expected, abs=4 * math.sqrt(variance / rounds) + 8 * 4 / rounds
    )  # the last of each is cut off


def test_a_step_takes_its_time() -> None:
    with cluster("simulation.target_step_ms=[[1, 10], [64, 10]]", "simulation.target_sequence_ms=5") as running:
        generate(running, [0, 0], max_tokens=100)
        timeline = running.target.timeline
    assert timeline is not None
    _, steps = timeline.steps.since(0)
    shortest = min(step.seconds for step in steps if step.num_sequences == 2)
    assert 0.02 <= shortest < 0.2  # the others may have been delayed by other work of the machine


def test_a_drafter_with_room_for_a_third_serves_that_third() -> None:
    """The answers outlast the test: where one ends, another sequence takes its room."""
    settings = ("draft.max_num_seqs=3", "speculation.controller=fixed", "target.max_model_len=100000")
    with cluster(*settings) as running:
        names = [running.submit(50_000, num_speculative_tokens=4, prompt_len=PROMPT_LEN) for _ in range(9)]
        answers = [running.answers[name] for name in names]

        def num_drafted_for() -> int:
            return sum(answer.num_draft_tokens > 0 for answer in answers)

        wait_until(lambda: num_drafted_for() == 3)
        so_far = max(len(answer.token_ids) for answer in answers)
        wait_until(lambda: min(len(answer.token_ids) for answer in answers) > so_far + 40)
        assert num_drafted_for() == 3
        for name in names:
            running.target.abort(name)
