from __future__ import annotations

import pytest

from cluster.config.simulation import SimulationConfig
from cluster.drafters.base import DraftSequence
from cluster.drafters.simulated import SimulatedDrafter
from cluster.engine.limits import StepLimits
from cluster.simulated_engines.tokens import token_at
from cluster.simulator.turns import VirtualTime
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams

VOCAB_SIZE = 1000


def new_drafter(time: VirtualTime | None = None, max_num_seqs: int = 4, **simulation: object) -> SimulatedDrafter:
    config = SimulationConfig(draft_step_ms=((1, 0.0),), **simulation)
    return SimulatedDrafter(config, VOCAB_SIZE, StepLimits(4096, max_num_seqs, 64), time or VirtualTime())


def new_sequence(seed: int = 0, prompt_len: int = 8) -> DraftSequence:
    key = NoiseKey.derive(seed, 0)
    return DraftSequence(list(range(prompt_len)), prompt_len, SamplingParams(), key, 4, 64)


def test_of_100_000_drafts_as_many_are_right_as_configured():
    """With a correct drafter this fails by chance once in 15,000 times: four standard deviations."""
    drafter, num_right = new_drafter(acceptance=0.75), 0
    for seed in range(2000):
        sequence = new_sequence(seed)
        assert drafter.admit(sequence)
        for _ in range(50):
            drafter.draft([sequence])
        num_right += sum(
            token == token_at(sequence.noise_key, position, VOCAB_SIZE)
            for position, token in enumerate(sequence.token_ids[8:], start=8)
        )
        drafter.release(sequence)
    assert num_right == pytest.approx(75_000, abs=4 * (100_000 * 0.75 * 0.25) ** 0.5)


def test_reruns_agree():
    texts = []
    for _ in range(2):
        drafter, sequence = new_drafter(acceptance=(0.9, 0.5)), new_sequence()
        drafter.admit(sequence)
        for _ in range(40):
            drafter.draft([sequence])
        texts.append(sequence.token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("place", "acceptance"), [(0, 0.9), (1, 0.5), (2, 0.1), (9, 0.1)])
def test_acceptance_by_place_goes_on_with_the_last(place, acceptance):
    assert new_drafter(acceptance=(0.9, 0.5, 0.1)).acceptance.at(place) == acceptance


def test_a_schedule_starts_with_the_first_sequence():
    clock = VirtualTime()
    drafter = new_drafter(clock, acceptance=0.9, acceptance_schedule=((20, 0.3), (40, 0.8)))
    clock.seconds = 100.0
    assert drafter.acceptance.at(0) == 0.9
    drafter.admit(new_sequence())
    for seconds, acceptance in ((100, 0.9), (119, 0.9), (121, 0.3), (139, 0.3), (141, 0.8), (1000, 0.8)):
        clock.seconds = seconds
        assert drafter.acceptance.at(0) == acceptance


def test_a_long_prompt_takes_several_steps():
    drafter, sequence = new_drafter(), new_sequence(prompt_len=130)
    drafter.admit(sequence)
    for num_drafted in (0, 0, 1, 2):
        drafter.draft([sequence])
        assert sequence.num_drafted == num_drafted


def test_it_reads_only_the_end_of_a_long_prompt():
    config = SimulationConfig(draft_step_ms=((1, 0.0),))
    drafter = SimulatedDrafter(config, VOCAB_SIZE, StepLimits(4096, 4, 64), VirtualTime(), context_tokens=100)
    sequence = new_sequence(prompt_len=1000)
    assert drafter.admit(sequence)
    rows = []
    while not sequence.num_drafted:
        drafter.draft([sequence])
        rows.append(drafter.num_step_rows)
    assert rows == [64, 40]


def test_a_full_context_begins_again_with_the_end():
    config = SimulationConfig(draft_step_ms=((1, 0.0),))
    drafter = SimulatedDrafter(config, VOCAB_SIZE, StepLimits(256, 4, 64), VirtualTime(), context_tokens=100)
    sequence = new_sequence(prompt_len=1000)
    assert drafter.admit(sequence)
    assert sequence.room(256) == 256 - 104
    news = [1] * (256 - 104)
    drafter.rewind(sequence, sequence.commit(sequence.base, news) or [])
    assert sequence.num_committed - sequence.num_skipped == 104


def test_without_room_in_its_context_auto_reads_less():
    config = SimulationConfig(draft_step_ms=((1, 0.0),))
    drafter = SimulatedDrafter(config, VOCAB_SIZE, StepLimits(256, 4, 64), VirtualTime(), context_tokens="auto")
    sequence = new_sequence(prompt_len=3000)
    assert drafter.admit(sequence)
    assert sequence.num_committed - sequence.num_skipped == 132


@pytest.mark.parametrize(("prompt_len", "ms"), [(1, 2.0), (1000, 2.5), (3000, 3.5)])
def test_tokens_read_take_time(prompt_len: int, ms: float):
    config = SimulationConfig(draft_step_ms=((1, 2.0),), draft_context_ms=(0.5, 0.2))
    clock = VirtualTime()
    drafter = SimulatedDrafter(config, VOCAB_SIZE, StepLimits(4096, 4, 4096), clock)
    sequence = new_sequence(prompt_len=prompt_len)
    assert drafter.admit(sequence)
    drafter.draft([sequence])
    before = clock.now()
    drafter.draft([sequence])
    assert clock.now() - before == pytest.approx(ms / 1e3, abs=1e-6)


def test_there_is_room_for_so_many_sequences():
    drafter, sequences = new_drafter(max_num_seqs=2), [new_sequence(seed) for seed in range(3)]
    assert [drafter.admit(sequence) for sequence in sequences] == [True, True, False]
    drafter.release(sequences[0])
    assert drafter.admit(sequences[2])


def test_in_one_pass_a_step_makes_the_proposal_and_a_guess_of_the_bonus_token():
    drafter, sequence = new_drafter(is_one_pass=True, acceptance=(1.0, 0.0)), new_sequence()
    drafter.admit(sequence)
    sequence.num_owed, sequence.window = 4, 10
    drafter.draft([sequence])
    assert sequence.num_drafted == 5
    right = [token_at(sequence.noise_key, sequence.num_committed + place, drafter.vocab_size) for place in range(5)]
    assert [own == other for own, other in zip(sequence.draft_token_ids, right, strict=True)] == [True, *[False] * 4]
    assert drafter.num_rows(sequence, sequence.tip) == 5 + 5 - 1
