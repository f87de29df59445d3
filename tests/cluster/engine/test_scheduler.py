from __future__ import annotations

import random

import pytest

from cluster.engine.blocks import BlockManager
from cluster.engine.limits import StepLimits
from cluster.engine.scheduler import ScheduledSequence, Scheduler
from cluster.engine.sequence import Sequence
from cluster.speculation.drafts import Drafts, chain, depths_of

from .invariants import assert_blocks_are_sound

BLOCK_SIZE = 4


def new_sequence(num_prompt: int, max_tokens: int = 8, *, k: int = 0, computed: int = 0) -> Sequence:
    return Sequence(list(range(num_prompt)), num_prompt, num_prompt + max_tokens, frozenset(), k, computed)


def new_scheduler(num_blocks: int = 64, max_num_seqs: int = 8, max_num_batched_tokens: int = 32) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, BLOCK_SIZE), StepLimits(4096, max_num_seqs, max_num_batched_tokens))


def no_drafts(sequence: Sequence) -> Drafts:
    return Drafts()


def run(scheduler: Scheduler, step: list[ScheduledSequence], num_accepted: int = 0) -> None:
    """Applies a step to its sequences: the target accepts `num_accepted` drafts of each."""
    for scheduled in step:
        accepted = min(num_accepted, len(scheduled.drafts))
        committed = scheduled.sequence.commit([7] * (accepted + 1)) if scheduled.yields_choices else 0
        scheduler.advance(scheduled, accepted, committed)


def num_useful_drafts(sequence: Sequence) -> int:
    """Returns `max_useful_drafts` as it was before the step was scheduled."""
    return max(0, min(sequence.max_drafts, sequence.max_len - len(sequence.token_ids) - 1))


def assert_sound(scheduler: Scheduler, step: list[ScheduledSequence]) -> None:
    """Asserts the invariants of every step."""
    assert sum(s.num_new_tokens + len(s.drafts) for s in step) <= scheduler._limits.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler._limits.max_num_seqs
    assert len({id(s.sequence) for s in step}) == len(step)
    decoding = {id(s) for s in scheduler.running if not s.is_prefilling}
    assert decoding <= {id(s.sequence) for s in step}, "a decoding sequence got no row"
    for scheduled in step:
        sequence, segment = scheduled.sequence, scheduled.segment()
        assert scheduled.num_new_tokens > 0
        assert sequence in scheduler.running
        assert segment.context_len <= len(sequence.block_table) * BLOCK_SIZE
        assert max(depths_of(scheduled.drafts.parents or chain(len(scheduled.drafts))), default=0) <= num_useful_drafts(
            sequence
        )
        assert not scheduled.drafts or scheduled.yields_choices
    assert_blocks_are_sound(scheduler._blocks, [s.block_table for s in scheduler.running])


class TestAdmission:
    def test_is_first_come_first_served_and_waits_for_blocks(self) -> None:
        scheduler = new_scheduler(num_blocks=8)
        first, large, small = new_sequence(16, 4), new_sequence(20, 4), new_sequence(1, 1)
        for sequence in (first, large, small):
            scheduler.add(sequence)
        assert scheduler.admit() == [first]  # 4 of 8 blocks
        assert scheduler.admit() == []  # large needs 5; small would fit but came later
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

    def test_takes_the_blocks_of_the_prompt(self) -> None:
        scheduler = new_scheduler()
        sequence = new_sequence(5, 100, k=4)
        scheduler.add(sequence)
        scheduler.admit()
        assert len(sequence.block_table) == 2

    def test_leaves_those_that_run_some_blocks_to_grow_into(self) -> None:
        scheduler = new_scheduler(num_blocks=300, max_num_seqs=200, max_num_batched_tokens=200)
        sequences = [new_sequence(8) for _ in range(150)]
        for sequence in sequences:
            scheduler.add(sequence)
        scheduler.admit()
        assert scheduler._blocks.num_available_blocks == 4  # at least 3, a hundredth

    def test_a_lone_sequence_may_take_the_whole_cache(self) -> None:
        scheduler = new_scheduler(num_blocks=2)
        sequence = new_sequence(7, 1)
        scheduler.add(sequence)
        assert scheduler.admit() == [sequence]

    def test_what_others_began_with_is_not_computed_again(self) -> None:
        scheduler = new_scheduler()
        first, second = new_sequence(13), new_sequence(13)
        scheduler.add(first)
        scheduler.admit()
        run(scheduler, scheduler.schedule(no_drafts))
        scheduler.add(second)
        scheduler.admit()
        assert second.num_computed_tokens == 12
        assert second.block_table[:3] == first.block_table[:3]
        step = scheduler.schedule(no_drafts)
        assert_sound(scheduler, step)
        assert step[1].segment().token_ids == [12]

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
            run(scheduler, step)
        assert chunks == [(8, 0), (8, 0), (4, 1), (1, 1)]

    def test_a_segment_continues_where_the_cache_ends(self) -> None:
        scheduler = new_scheduler(max_num_batched_tokens=8)
        sequence = new_sequence(11, k=2)
        scheduler.add(sequence)
        scheduler.admit()
        run(scheduler, scheduler.schedule(no_drafts))
        step = scheduler.schedule(no_drafts)
        segment = step[0].segment()
        assert (segment.token_ids, segment.num_computed_tokens, segment.num_logits) == ([8, 9, 10], 8, 1)
        run(scheduler, step)
        segment = scheduler.schedule(lambda _: Drafts([5, 6]))[0].segment()
        assert (segment.token_ids, segment.num_computed_tokens, segment.num_logits) == ([7, 5, 6], 11, 3)

    def test_a_prompt_of_one_token_is_drafted_for_at_once(self) -> None:
        scheduler = new_scheduler()
        scheduler.add(new_sequence(1, k=3))
        scheduler.admit()
        (scheduled,) = scheduler.schedule(lambda _: Drafts([4, 5, 6]))
        assert (scheduled.num_new_tokens, list(scheduled.drafts.token_ids), scheduled.num_choices) == (1, [4, 5, 6], 4)

    @pytest.mark.parametrize(("k", "max_tokens", "num_drafts"), [(4, 8, 4), (2, 8, 2), (4, 4, 2), (4, 3, 1), (4, 2, 0)])
    def test_drafts_are_cut_to_what_can_be_committed(self, k: int, max_tokens: int, num_drafts: int) -> None:
        scheduler = new_scheduler()
        sequence = new_sequence(3, max_tokens, k=k)
        scheduler.add(sequence)
        scheduler.admit()
        run(scheduler, scheduler.schedule(no_drafts))
        assert len(scheduler.schedule(lambda _: Drafts([1] * 9))[0].drafts) == num_drafts

    def test_a_tree_is_cut_to_the_depth_that_can_be_committed_and_stays_a_tree(self) -> None:
        """Drafts are 1 → (2 → 4 → 6, 3 → 5). Two in a row can be accepted, and blocks have room for four."""
        scheduler = new_scheduler(num_blocks=2)
        scheduler.add(new_sequence(3, 4, k=8))
        scheduler.admit()
        run(scheduler, scheduler.schedule(no_drafts))
        (scheduled,) = scheduler.schedule(lambda _: Drafts([1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 2, 3]))
        assert scheduled.drafts == Drafts([1, 2, 3], [-1, 0, 0])
        segment = scheduled.segment()
        assert (segment.token_ids, segment.parents) == ([7, 1, 2, 3], [-1, 0, 1, 1])
        assert_sound(scheduler, [scheduled])

    @pytest.mark.parametrize("seed", range(10))
    def test_a_tree_without_room_for_all_of_it_is_cut_to_its_first_nodes(self, seed: int) -> None:
        choose = random.Random(seed)
        scheduler = new_scheduler(num_blocks=choose.randint(3, 4), max_num_batched_tokens=choose.randint(8, 16))
        sequence = new_sequence(5, 5, k=16)
        scheduler.add(sequence)
        scheduler.admit()
        run(scheduler, scheduler.schedule(no_drafts))
        drafts = Drafts(range(1, 17), [choose.randrange(-1, node) for node in range(16)])
        (scheduled,) = step = scheduler.schedule(lambda _: drafts)
        useful = drafts.within(num_useful_drafts(sequence))
        assert 0 < len(scheduled.drafts) <= len(useful)
        assert scheduled.drafts == useful.first(len(scheduled.drafts))
        assert_sound(scheduler, step)

    def test_drafts_are_cut_to_the_budget_and_every_sequence_keeps_its_row(self) -> None:
        scheduler = new_scheduler(max_num_seqs=4, max_num_batched_tokens=9)
        for _ in range(4):
            scheduler.add(new_sequence(1, k=4))
        scheduler.admit()
        step = scheduler.schedule(lambda _: Drafts([1, 2, 3, 4]))
        assert [len(s.drafts) for s in step] == [4, 1, 0, 0]
        assert_sound(scheduler, step)

    def test_drafts_leave_waiting_prompts_half_of_what_is_left(self) -> None:
        scheduler = new_scheduler(max_num_batched_tokens=12)
        scheduler.add(new_sequence(1, k=8))
        scheduler.add(new_sequence(1, k=8))
        scheduler.add(new_sequence(30))
        scheduler.admit()
        step = scheduler.schedule(lambda _: Drafts([1] * 8))
        assert [(s.num_new_tokens, len(s.drafts)) for s in step] == [(1, 5), (1, 0), (5, 0)]

    def test_a_short_prompt_does_not_wait_for_a_long_one(self) -> None:
        scheduler = new_scheduler(num_blocks=100, max_num_batched_tokens=32)
        long, short = new_sequence(200), new_sequence(10)
        for sequence in (long, short):
            scheduler.add(sequence)
        scheduler.admit()
        step = scheduler.schedule(no_drafts)
        assert [(s.sequence, s.num_new_tokens) for s in step] == [(long, 22), (short, 10)]
        assert_sound(scheduler, step)

    def test_a_prompt_of_a_higher_priority_has_all_it_needs_first(self) -> None:
        scheduler = new_scheduler(num_blocks=100, max_num_batched_tokens=32)
        urgent, other = new_sequence(30), new_sequence(10)
        other.priority = 1
        for sequence in (other, urgent):
            scheduler.add(sequence)
        scheduler.admit()
        assert [(s.sequence, s.num_new_tokens) for s in scheduler.schedule(no_drafts)] == [(urgent, 30), (other, 2)]

    def test_prompts_take_what_the_pace_allows(self) -> None:
        limits = StepLimits(4096, 8, 512, max_prefill_seconds=0.05)
        scheduler = Scheduler(BlockManager(200, BLOCK_SIZE), limits)
        scheduler.pace.know([(rows, 1e-3 * rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)])
        scheduler.add(new_sequence(400))
        scheduler.admit()
        (alone,) = scheduler.schedule(no_drafts)
        assert alone.num_new_tokens == pytest.approx(200, abs=20)
        scheduler.add(new_sequence(20))
        scheduler.admit()
        assert [s.num_new_tokens for s in scheduler.schedule(no_drafts)] == pytest.approx([30, 20], abs=5)

    def test_a_full_house_of_decoding_sequences_cannot_stop_a_prompt(self) -> None:
        scheduler = new_scheduler(max_num_seqs=4, max_num_batched_tokens=4)
        for _ in range(3):
            scheduler.add(new_sequence(1, k=4))
        prompt = new_sequence(5)
        scheduler.add(prompt)
        scheduler.admit()
        for _ in range(4):
            assert prompt.is_prefilling
            step = scheduler.schedule(lambda _: Drafts([1] * 4))
            assert_sound(scheduler, step)
            run(scheduler, step)
        assert not prompt.is_prefilling

    def test_with_nothing_running_there_is_no_step(self) -> None:
        assert new_scheduler().schedule(no_drafts) == []


class TestWhenBlocksRunOut:
    """Blocks of 4 tokens."""

    def start(self, num_blocks: int, *sequences: Sequence) -> Scheduler:
        """A scheduler in which `sequences`, all without a common beginning, decode."""
        scheduler = new_scheduler(num_blocks)
        for index, sequence in enumerate(sequences):
            sequence.token_ids[0] = 1000 + index
            scheduler.add(sequence)
        assert len(scheduler.admit()) == len(sequences)
        run(scheduler, scheduler.schedule(no_drafts))
        return scheduler

    def test_drafts_take_what_is_left_and_no_more(self) -> None:
        scheduler = self.start(5, new_sequence(6, 9, k=8), new_sequence(6, 9, k=8))
        step = scheduler.schedule(lambda _: Drafts([5] * 8))
        assert_sound(scheduler, step)
        # Both have 7 tokens. The first takes the last block; the second has one place left in its own.
        assert [len(scheduled.drafts) for scheduled in step] == [5, 1]

    def test_speculation_gives_way_before_anything_is_preempted(self) -> None:
        first, second = new_sequence(6, 9, k=5), new_sequence(7, 9, k=5)
        scheduler = self.start(5, first, second)
        step = scheduler.schedule(lambda sequence: Drafts([5] * 5 if sequence is first else []))
        assert len(step[0].drafts) == 5
        assert len(first.block_table) == 3
        run(scheduler, step)  # nothing accepted: the third block holds rejected drafts
        step = scheduler.schedule(lambda _: Drafts([5] * 5))
        assert scheduler.num_preemptions == 0
        assert [len(s.block_table) for s in (first, second)] == [2, 3]
        # 8 and 9 tokens: what is left of their blocks.
        assert [len(scheduled.drafts) for scheduled in step] == [0, 3]
        assert_sound(scheduler, step)

    def test_the_youngest_is_preempted_and_waits_before_all_others(self) -> None:
        sequences = [new_sequence(4, 8) for _ in range(3)]
        scheduler = self.start(7, *sequences)
        later = new_sequence(1, 1)
        scheduler.add(later)
        for _ in range(4):  # from 5 to 9 tokens
            step = scheduler.schedule(no_drafts)
            assert_sound(scheduler, step)
            run(scheduler, step)
            assert scheduler.admit() == []  # 6 of 7 blocks are taken, and 1 is to grow into
        step = scheduler.schedule(no_drafts)
        assert_sound(scheduler, step)
        assert scheduler.running == sequences[:2]
        assert list(scheduler.waiting) == [sequences[2], later]
        assert scheduler.num_preemptions == 1
        assert not sequences[2].block_table
        assert len(sequences[2].token_ids) == 9
        assert scheduler.admit() == []  # it would only push itself out again

    def test_it_is_computed_again_with_what_it_had_generated(self) -> None:
        sequences = [new_sequence(4, 8) for _ in range(3)]
        scheduler = self.start(7, *sequences)
        for _ in range(5):
            run(scheduler, scheduler.schedule(no_drafts))
        preempted = sequences[2]
        token_ids = list(preempted.token_ids)
        scheduler.remove(sequences[0])
        assert scheduler.admit() == [preempted]
        assert preempted.is_prefilling
        step = scheduler.schedule(no_drafts)
        assert_sound(scheduler, step)
        # Of the two blocks it had filled, the second was taken by another sequence.
        segment = next(s for s in step if s.sequence is preempted).segment()
        assert (segment.num_computed_tokens, segment.token_ids) == (4, token_ids[4:])
        run(scheduler, step)
        assert preempted.token_ids == [*token_ids, 7]

    def test_a_preempted_sequence_can_be_removed(self) -> None:
        sequences = [new_sequence(4, 8) for _ in range(3)]
        scheduler = self.start(7, *sequences)
        for _ in range(5):
            run(scheduler, scheduler.schedule(no_drafts))
        assert sequences[2] in scheduler.waiting
        for sequence in sequences:
            scheduler.remove(sequence)
        assert scheduler._blocks.num_used_blocks == 0
        assert not scheduler.waiting

    def test_a_lone_sequence_is_never_preempted(self) -> None:
        scheduler = self.start(3, new_sequence(4, 8, k=4))
        for _ in range(7):
            step = scheduler.schedule(lambda _: Drafts([5] * 4))
            assert len(step) == 1
            assert_sound(scheduler, step)
            run(scheduler, step)
        assert scheduler.running[0].finish_reason is not None
        assert scheduler.num_preemptions == 0


def of_owner(owner: str, num_prompt: int = 1, max_tokens: int = 8, priority: int = 0) -> Sequence:
    sequence = new_sequence(num_prompt, max_tokens)
    sequence.owner, sequence.priority = owner.encode(), priority
    sequence.token_ids[0] = id(sequence)  # nothing is cached
    return sequence


class TestOwners:
    """Owners of sequences share the places and the KV cache."""

    def start(self, sequences: list[Sequence], num_blocks: int = 64, max_num_seqs: int = 4) -> Scheduler:
        scheduler = new_scheduler(num_blocks, max_num_seqs, 4096)
        for sequence in sequences:
            scheduler.add(sequence)
        scheduler.admit()
        run(scheduler, scheduler.schedule(no_drafts))
        return scheduler

    def owners(self, scheduler: Scheduler) -> str:
        return "".join(sorted(sequence.owner.decode() for sequence in scheduler.running))

    def test_whoever_has_least_is_next(self) -> None:
        waiting = [of_owner(owner) for owner in "aaaaabbc"]
        scheduler = self.start(waiting)
        assert self.owners(scheduler) == "aabc"
        assert [s.owner for s in scheduler.waiting.in_order(scheduler.running)] == [b"b", b"a", b"a", b"a"]

    def test_one_who_has_all_places_gives_some_back(self) -> None:
        scheduler = self.start([of_owner("a") for _ in range(9)])
        others = [of_owner("b") for _ in range(4)]
        for other in others:
            scheduler.add(other)
        youngest = scheduler.running[-1]
        tokens = list(youngest.token_ids)
        assert scheduler.admit() == others[:1]
        assert self.owners(scheduler) == "aaab"  # for a second place `a` would have to keep as many as `b` has then
        assert scheduler.admit() == []
        assert scheduler.num_preemptions == 1
        assert next(iter(scheduler.waiting)) is youngest
        assert youngest.token_ids == tokens
        scheduler.remove(scheduler.running[0])
        assert scheduler.admit() == others[1:2]

    def test_nobody_yields_if_that_is_not_enough(self) -> None:
        scheduler = self.start([of_owner("a", 40), of_owner("a", 4), of_owner("b", 60)], num_blocks=30)
        scheduler.add(of_owner("c", 50))  # `a` would keep less than `c` had
        assert scheduler.admit() == []
        assert scheduler.num_preemptions == 0
        assert self.owners(scheduler) == "aab"

    def test_several_yield_for_one_that_is_larger(self) -> None:
        scheduler = self.start([of_owner("a", 12) for _ in range(9)], num_blocks=30, max_num_seqs=9)
        large = of_owner("b", 30)
        scheduler.add(large)
        assert scheduler.admit() == [large]
        assert self.owners(scheduler) == "aaaaaaab"
        assert scheduler.num_preemptions == 2

    def test_as_few_yield_as_are_enough(self) -> None:
        scheduler = self.start([of_owner("a") for _ in range(20)], max_num_seqs=20)
        scheduler.add(of_owner("b"))
        needed = [scheduler.running[17], scheduler.running[5]]
        queue, running = scheduler.waiting, scheduler.running
        assert [*queue.who_yield(running, lambda yielding: {*needed} <= {*yielding})] == needed
        assert not queue.who_yield(running, lambda yielding: scheduler.running[0] in yielding)

    def test_one_without_an_owner_does_not_keep_others_from_yielding(self) -> None:
        scheduler = self.start([of_owner("", priority=3), *(of_owner("a") for _ in range(3))])
        other = of_owner("b")
        scheduler.add(other)
        assert scheduler.admit() == [other]
        assert self.owners(scheduler) == "aab"

    def test_sequences_of_an_owner_yield_in_turn(self) -> None:
        scheduler = self.start([of_owner("a", max_tokens=200) for _ in range(4)])
        owned = {*scheduler.running}
        for _ in range(4):
            other = of_owner("b")
            scheduler.add(other)
            assert scheduler.admit() == [other]
            scheduler.remove(other)
            scheduler.admit()
        assert {sequence.num_preemptions for sequence in owned} == {1}

    def test_equal_owners_take_nothing_from_each_other(self) -> None:
        scheduler = self.start([of_owner(owner) for owner in "aabb" + "abc" * 3])
        assert scheduler.num_preemptions == 0
        assert self.owners(scheduler) == "aabc"
        for _ in range(40):
            scheduler.admit()
            run(scheduler, scheduler.schedule(no_drafts))
            scheduler.remove(*[sequence for sequence in scheduler.running if sequence.finish_reason is not None])
        assert scheduler.num_preemptions == 0
        assert not scheduler.running

    def test_kv_is_shared_as_places_are(self) -> None:
        scheduler = self.start([of_owner("a", 40, 80) for _ in range(3)], num_blocks=35, max_num_seqs=30)
        short = [of_owner("b", 12) for _ in range(3)]
        for sequence in short:
            scheduler.add(sequence)
        assert self.owners(scheduler) == "aaa"
        assert scheduler.admit() == short
        assert self.owners(scheduler) == "aabbb"
        assert_sound(scheduler, scheduler.schedule(no_drafts))

    def test_growth_takes_from_whoever_has_most(self) -> None:
        first = of_owner("a", 16, 30)
        scheduler = self.start([first, of_owner("a", 16, 30), of_owner("b", 4, 30)], num_blocks=12)
        for _ in range(12):
            run(scheduler, scheduler.schedule(no_drafts))
        assert self.owners(scheduler) == "ab"
        assert scheduler.running[0] is first

    def test_low_priorities_order_only_an_owners_own(self) -> None:
        scheduler = self.start([of_owner("a", priority=-(2**31)) for _ in range(4)] + [of_owner("b", priority=7)])
        assert self.owners(scheduler) == "aaab"
        later, urgent = of_owner("c", priority=5), of_owner("c", priority=-5)
        scheduler.add(later)
        scheduler.add(urgent)
        assert scheduler.admit() == [urgent]

    def test_without_an_owner_a_priority_counts_among_all(self) -> None:
        urgent = [of_owner("", priority=-1) for _ in range(4)]
        scheduler = self.start([*urgent, of_owner("a")])
        assert scheduler.admit() == []
        late = of_owner("", priority=1)
        scheduler.add(late)
        scheduler.remove(urgent[0])
        (admitted,) = scheduler.admit()
        assert admitted.owner == b"a"
        assert list(scheduler.waiting) == [late]

    def test_a_low_priority_takes_no_step_from_another_owner(self) -> None:
        scheduler = new_scheduler(2000, 8, 512)
        for sequence in (of_owner("a", 5000, priority=-(2**31)), of_owner("b", 20)):
            scheduler.add(sequence)
        scheduler.admit()
        step = scheduler.schedule(no_drafts)
        assert [(s.sequence.owner, s.num_new_tokens) for s in step] == [(b"a", 492), (b"b", 20)]

    def test_many_prompts_of_one_owner_come_after_anothers(self) -> None:
        scheduler = new_scheduler(2000, 8, 1300)
        for sequence in (*(of_owner("a", 1100) for _ in range(3)), of_owner("b", 150)):
            scheduler.add(sequence)
        scheduler.admit()
        step = scheduler.schedule(no_drafts)
        assert [(s.sequence.owner, s.num_new_tokens) for s in step] == [(b"a", 1100), (b"b", 150), (b"a", 50)]


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
                run(scheduler, scheduler.schedule(no_drafts))
        scheduler.remove(sequence)
        assert not sequence.block_table
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
        with pytest.raises(ValueError, match="neither running nor waiting"):
            scheduler.remove(sequence)

    def test_thousands_that_leave_at_once_are_looked_for_once(self) -> None:
        scheduler, num_compared = new_scheduler(), 0

        class Compared(Sequence):
            __hash__ = object.__hash__

            def __eq__(self, other: object) -> bool:
                nonlocal num_compared
                num_compared += 1
                return self is other

        sequences = [Compared([1], 1, 9, frozenset(), 0) for _ in range(2000)]
        for sequence in sequences:
            scheduler.add(sequence)
        scheduler.admit()
        kept = [sequences.pop(1000), sequences.pop(0)]
        num_compared = 0
        scheduler.remove(*reversed(sequences))
        assert (list(scheduler.waiting), scheduler.running) == (kept[:1], kept[1:])
        assert num_compared < 10_000


@pytest.mark.parametrize("num_owners", [1, 3])
@pytest.mark.parametrize(("seed", "num_blocks"), [(0, 20), (1, 20), (2, 16), (3, 16), (4, 60)])
def test_a_long_mixed_run_stays_sound_and_ends_empty(seed: int, num_blocks: int, num_owners: int) -> None:
    choose = random.Random(seed)
    scheduler = new_scheduler(num_blocks=num_blocks, max_num_seqs=5, max_num_batched_tokens=12)
    num_arrivals = 40
    arrival: dict[Sequence, int] = {}
    for _ in range(3000):
        if num_arrivals and choose.random() < 0.3:
            num_arrivals -= 1
            sequence = new_sequence(choose.randint(1, 40), choose.randint(1, 20), k=choose.randint(0, 6))
            sequence.token_ids[0] = choose.randrange(3)
            arrival[sequence] = len(arrival)
            sequence.owner = bytes([len(arrival) % num_owners])
            scheduler.add(sequence)
        scheduler.admit()
        step = scheduler.schedule(lambda _: Drafts([7] * choose.randint(0, 8)))
        assert_sound(scheduler, step)
        assert step or not scheduler.running
        order = [arrival[sequence] for sequence in (*scheduler.running, *scheduler.waiting)]
        assert num_owners > 1 or order == sorted(order)
        run(scheduler, step, num_accepted=choose.randint(0, 4))
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
    assert num_owners > 1 or (scheduler.num_preemptions > 0) == (num_blocks < 60)
    assert scheduler._blocks.num_hit_tokens > 0
