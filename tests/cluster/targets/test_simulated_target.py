"""Simulated engines behind the real step loop, rounds and streams."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from bench.in_process import SIMULATED, Answer, SimulatedCluster
from cluster.config_file import load_config
from cluster.simulation.tokens import token_at
from cluster.speculation.noise import NoiseKey

FAST = (
    "simulation.target_step_ms=[[1, 0.5], [64, 1.0]]",
    "simulation.draft_step_ms=[[1, 0.1]]",
    "speculation.draft_timeout_ms=10000",
)
PROMPT_LEN = 32


def cluster(*overrides: str) -> SimulatedCluster:
    return SimulatedCluster(load_config(None, [*SIMULATED, *FAST, *overrides]))


def generate(running: SimulatedCluster, depths: Sequence[int | None], max_tokens: int) -> dict[int, Answer]:
    """One request for each of `depths`, together; the answers by seed."""
    names = [running.submit(max_tokens, num_speculative_tokens=k, prompt_len=PROMPT_LEN) for k in depths]
    running.wait(names, timeout=60)
    return {int(name): running.answers[name] for name in names}


@pytest.mark.parametrize("settings", [(), ("speculation.tree_width=3",), ("simulation.round_trip_ms=2",)])
def test_same_tokens_with_and_without_speculation(settings: Sequence[str]) -> None:
    with cluster(*settings) as running:
        answers = generate(running, [0, 1, 4, 8, None], max_tokens=60)
        vocab_size = running.target.model.vocab_size
    for seed, answer in answers.items():
        key = NoiseKey.derive(seed, 0)
        assert answer.token_ids == [token_at(key, PROMPT_LEN + place, vocab_size) for place in range(60)]
    plain, *speculative, _ = answers.values()  # what the controller does with the last depends on its steps' times
    assert plain.num_draft_tokens == 0
    assert all(answer.num_accepted_tokens > 0 for answer in speculative)


def test_acceptance_is_as_configured() -> None:
    """Fails by chance once in 15,000 times: four standard deviations."""
    with cluster("simulation.acceptance=0.6", "speculation.controller=fixed") as running:
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
        generate(running, [0, 0], max_tokens=20)
        readings = {r.name: r.value for r in running.target.readings() if r.labels.get("kind", "decode") == "decode"}
    mean = readings["outrider_step_seconds"] / readings["outrider_steps"]
    assert 0.02 <= mean < 0.03


def test_a_drafter_with_room_for_a_third_serves_that_third() -> None:
    # Nobody waits for the drafts of a third: a step must last until they are here.
    with cluster("draft.max_num_seqs=3", "simulation.target_step_ms=[[1, 20]]") as running:
        answers = generate(running, [4] * 9, max_tokens=40).values()
    assert sorted(answer.num_draft_tokens > 0 for answer in answers) == [False] * 6 + [True] * 3
    assert all(len(answer.token_ids) == 40 for answer in answers)
