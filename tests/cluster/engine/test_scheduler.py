from __future__ import annotations

import random

import pytest

from cluster.engine.blocks import BlockManager
from cluster.engine.scheduler import ScheduledSequence, Scheduler
from cluster.engine.sequence import Sequence

from .invariants import assert_blocks_are_sound

BLOCK_SIZE = 4


def new_sequence(num_prompt: int, max_tokens: int = 8, *, k: int = 0, computed: int = 0) -> Sequence:
    return Sequence(list(range(num_prompt)), num_prompt, num_prompt + max_tokens, frozenset(), k, computed)


def new_scheduler(num_blocks: int = 64, max_num_seqs: int = 8, max_num_batched_tokens: int = 32) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, BLOCK_SIZE), max_num_seqs, max_num_batched_tokens)


def no_drafts(sequence: Sequence) -> list[int]:
    return []


def run(step: list[ScheduledSequence], num_accepted: int = 0) -> None:
    """What a step does to its sequences when the target accepts `num_accepted` drafts of each."""
    for scheduled in step:
        sequence, yields_choices = scheduled.sequence, scheduled.yields_choices
        accepted = min(num_accepted, len(scheduled.draft_token_ids))
        sequence.num_computed_tokens += scheduled.num_new_tokens + accepted
        if yields_choices:
            sequence.commit([7] * (accepted + 1))


def assert_sound(scheduler: Scheduler, step: list[ScheduledSequence]) -> None:
    """Nothing that must hold of every step is broken."""
    assert sum(s.num_new_tokens + len(s.draft_token_ids) for s in step) <= scheduler._max_num_batched_tokens
    assert len(scheduler.running) <= scheduler._max_num_seqs
    assert len({id(s.sequence) for s in step}) == len(step)
    decoding = {id(s) for s in scheduler.running if not s.is_prefilling}
    assert decoding <= {id(s.sequence) for s in step}, "a decoding sequence got no row"
    for scheduled in step:
        sequence, segment = scheduled.sequence, scheduled.segment()
        assert scheduled.num_new_tokens > 0
        assert sequence in scheduler.running
        assert segment.context_len <= len(sequence.block_table) * BLOCK_SIZE
        assert len(scheduled.draft_token_ids) <= sequence.max_useful_drafts
        assert not scheduled.draft_token_ids or scheduled.yields_choices
    assert_blocks_are_sound(scheduler._blocks, [s.block_table for s in scheduler.running])


class TestAdmission:
    def test_is_first_come_first_served_and_waits_for_blocks(self) -> None:
        scheduler = new_scheduler(num_blocks=8)
        first, large, small = new_sequence(16, 4), new_sequence(20, 4), new_sequence(1, 1)
        for sequence in (first, large, small):
            scheduler.add(sequence)
        assert scheduler.admit() == [first]  # 5 of 8 blocks
        assert scheduler.admit() == []  # large needs 6; small would fit but came later
        scheduler.remove(first)
        assert scheduler.admit() == [large, small]
        assert_sound(scheduler, scheduler.schedule(no_drafts))

    def test_stops_at_the_number_of_sequences(self) -> None:
        scheduler = new_scheduler(max_num_seqs=2)
        sequences = [new_sequence(3) for _ in range(3)]
        for sequence in sequences:
            scheduler.add(sequence)
        assert scheduler.admit() == sequences[:2]
        assert list(scheduler.waiting) == sequences[2:]

    @pytest.mark.parametrize(
        ("num_prompt", "max_tokens", "k", "num_blocks"), [(5, 3, 0, 2), (5, 3, 1, 3), (5, 4, 4, 4)]
    )
    def test_reserves_the_whole_sequence_and_its_speculative_slots(
        self, num_prompt: int, max_tokens: int, k: int, num_blocks: int
    ) -> None:
        scheduler = new_scheduler()
        sequence = new_sequence(num_prompt, max_tokens, k=k)
        scheduler.add(sequence)
        scheduler.admit()
        assert len(sequence.block_table) == num_blocks

    def test_a_sequence_beyond_the_cache_is_never_added(self) -> None:
        scheduler = new_scheduler(num_blocks=2)
        scheduler.add(new_sequence(6, 2))
        with pytest.raises(AssertionError):
            scheduler.add(new_sequence(7, 2))


class TestSteps:
    def test_a_prompt_is_computed_in_chunks_and_then_decodes(self) -> None:
        scheduler = new_scheduler(max_num_batched_tokens=8)
        sequence = new_sequence(20)
        scheduler.add(sequence)
        scheduler.admit()
        chunks = []
        for _ in range(4):
            (scheduled,) = step = scheduler.schedule(no_drafts)
            assert_sound(scheduler, step)
            chunks.append((scheduled.num_new_tokens, scheduled.num_choices))
            run(step)
        assert chunks == [(8, 0), (8, 0), (4, 1), (1, 1)]

    def test_a_segment_continues_where_the_cache_ends(self) -> None:
        scheduler = new_scheduler(max_num_batched_tokens=8)
        sequence = new_sequence(11, k=2)
        scheduler.add(sequence)
        scheduler.admit()
        run(scheduler.schedule(no_drafts))
        segment = scheduler.schedule(no_drafts)[0].segment()
        assert (segment.token_ids, segment.num_computed_tokens, segment.num_logits) == ([8, 9, 10], 8, 1)
        run(scheduler.schedule(no_drafts))
        segment = scheduler.schedule(lambda _: [5, 6])[0].segment()
        assert (segment.token_ids, segment.num_computed_tokens, segment.num_logits) == ([7, 5, 6], 11, 3)

    def test_a_prompt_of_one_token_is_drafted_for_at_once(self) -> None:
        scheduler = new_scheduler()
        scheduler.add(new_sequence(1, k=3))
        scheduler.admit()
        (scheduled,) = scheduler.schedule(lambda _: [4, 5, 6])
        assert (scheduled.num_new_tokens, scheduled.draft_token_ids, scheduled.num_choices) == (1, [4, 5, 6], 4)

    @pytest.mark.parametrize(("k", "max_tokens", "num_drafts"), [(4, 8, 4), (2, 8, 2), (4, 4, 2), (4, 3, 1), (4, 2, 0)])
    def test_drafts_are_cut_to_what_can_be_committed(self, k: int, max_tokens: int, num_drafts: int) -> None:
        scheduler = new_scheduler()
        sequence = new_sequence(3, max_tokens, k=k)
        scheduler.add(sequence)
        scheduler.admit()
        run(scheduler.schedule(no_drafts))
        assert len(scheduler.schedule(lambda _: [1] * 9)[0].draft_token_ids) == num_drafts

    def test_drafts_are_cut_to_the_budget_and_every_sequence_keeps_its_row(self) -> None:
        scheduler = new_scheduler(max_num_seqs=4, max_num_batched_tokens=9)
        for _ in range(4):
            scheduler.add(new_sequence(1, k=4))
        scheduler.admit()
        step = scheduler.schedule(lambda _: [1, 2, 3, 4])
        assert [len(s.draft_token_ids) for s in step] == [4, 1, 0, 0]
        assert_sound(scheduler, step)

    def test_drafts_leave_waiting_prompts_half_of_what_is_left(self) -> None:
        scheduler = new_scheduler(max_num_batched_tokens=12)
        scheduler.add(new_sequence(1, k=8))
        scheduler.add(new_sequence(1, k=8))
        scheduler.add(new_sequence(30))
        scheduler.admit()
        step = scheduler.schedule(lambda _: [1] * 8)
        assert [(s.num_new_tokens, len(s.draft_token_ids)) for s in step] == [(1, 5), (1, 0), (5, 0)]

    def test_a_full_house_of_decoding_sequences_cannot_stop_a_prompt(self) -> None:
        scheduler = new_scheduler(max_num_seqs=4, max_num_batched_tokens=4)
        for _ in range(3):
            scheduler.add(new_sequence(1, k=4))
        prompt = new_sequence(5)
        scheduler.add(prompt)
        scheduler.admit()
        for _ in range(4):
            assert prompt.is_prefilling
            step = scheduler.schedule(lambda _: [1] * 4)
            assert_sound(scheduler, step)
            run(step)
        assert not prompt.is_prefilling

    def test_with_nothing_running_there_is_no_step(self) -> None:
        assert new_scheduler().schedule(no_drafts) == []


class TestRemoval:
    @pytest.mark.parametrize("state", ["waiting", "admitted", "half prefilled", "decoding", "finished"])
    def test_frees_everything_in_every_state(self, state: str) -> None:
        scheduler = new_scheduler(max_num_batched_tokens=8)
        other, sequence = new_sequence(2), new_sequence(12, 3, k=2)
        scheduler.add(other)
        scheduler.add(sequence)
        num_steps = {"waiting": None, "admitted": 0, "half prefilled": 1, "decoding": 3, "finished": 6}[state]
        if num_steps is not None:
            scheduler.admit()
            for _ in range(num_steps):
                run(scheduler.schedule(no_drafts))
        scheduler.remove(sequence)
        assert sequence.block_table == []
        assert sequence not in scheduler.waiting
        assert_blocks_are_sound(scheduler._blocks, [s.block_table for s in scheduler.running])
        scheduler.remove(other)
        assert scheduler._blocks.num_used_blocks == 0
        assert not scheduler.running
        assert not scheduler.waiting

    def test_removing_twice_is_our_mistake(self) -> None:
        scheduler = new_scheduler()
        sequence = new_sequence(2)
        scheduler.add(sequence)
        scheduler.remove(sequence)
        with pytest.raises(ValueError, match="not in deque"):
            scheduler.remove(sequence)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_mixed_run_stays_sound_and_ends_empty(seed: int) -> None:
    choose = random.Random(seed)
    scheduler = new_scheduler(num_blocks=30, max_num_seqs=5, max_num_batched_tokens=12)
    num_arrivals = 40
    for _ in range(2000):
        if num_arrivals and choose.random() < 0.3:
            num_arrivals -= 1
            scheduler.add(new_sequence(choose.randint(1, 40), choose.randint(1, 20), k=choose.randint(0, 6)))
        scheduler.admit()
        step = scheduler.schedule(lambda _: [7] * choose.randint(0, 8))
        assert_sound(scheduler, step)
        assert step or not scheduler.running
        run(step, num_accepted=choose.randint(0, 4))
        for sequence in [s for s in scheduler.running if s.finish_reason is not None]:
            scheduler.remove(sequence)
        everyone = [*scheduler.running, *scheduler.waiting]
        if everyone and choose.random() < 0.05:
            scheduler.remove(choose.choice(everyone))
        if not num_arrivals and not everyone:
            break
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler._blocks.num_used_blocks == 0
