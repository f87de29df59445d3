from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from cluster.config.simulation import SimulationConfig
from cluster.drafters.base import DraftSequence
from cluster.drafters.model import ModelDrafter
from cluster.drafters.simulated import SimulatedDrafter
from cluster.engine.batch import Segment
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.speculation.noise import NoiseKey, gumbel_noise
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 17, 300, 42, 42, 9, 111, 250, 8, 77, 501]

NewDrafter = Callable[..., ModelDrafter]


@pytest.fixture(scope="module")
def new_drafter(new_runner: Callable[..., ModelRunner]) -> NewDrafter:
    def make(
        num_blocks: int = 64, max_model_len: int = 256, max_num_seqs: int = 8, max_num_batched_tokens: int = 64
    ) -> ModelDrafter:
        return ModelDrafter(new_runner(4, num_blocks), StepLimits(max_model_len, max_num_seqs, max_num_batched_tokens))

    return make


@pytest.fixture(scope="module")
def continuation(new_runner: Callable[..., ModelRunner]) -> Callable[..., list[int]]:
    """continuation(tokens, n, params, key): n tokens, each argmax(logits / T + noise) of the whole prefix."""
    runner = new_runner(4, 64)

    def compute(tokens: list[int], n: int, params: SamplingParams, key: NoiseKey) -> list[int]:
        tokens = list(tokens)
        for _ in range(n):
            scores = runner.run([Segment(tokens, 0, list(range(64)), num_logits=1)])[0].float()
            if not params.is_greedy:
                noise = torch.from_numpy(gumbel_noise([(key, len(tokens))], len(scores))[0])
                scores = scores / params.temperature + noise
            tokens.append(int(scores.argmax()))
        return tokens[-n:]

    return compute


def new_sequence(
    tokens: list[int] = PROMPT, *, params: SamplingParams = GREEDY, seed: int = 0, window: int = 10
) -> DraftSequence:
    key = NoiseKey.derive(seed, 0)
    return DraftSequence(list(tokens), len(tokens), params, key, num_owed=4, window=window)


def draft_until(drafter: ModelDrafter, num_drafts: int, *sequences: DraftSequence) -> None:
    """Steps until every sequence has `num_drafts` drafts."""
    for _ in range(1000):
        waiting = [s for s in sequences if s.num_drafted < num_drafts]
        if not waiting:
            return
        assert drafter.draft(waiting) == []
    raise AssertionError("no end of steps")


def advance(drafter: ModelDrafter, sequence: DraftSequence, news: list[int]) -> None:
    kept = sequence.commit(sequence.num_committed, news)
    assert kept is not None
    drafter.rewind(sequence, kept)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(temperature=0.7)], ids=str)
@pytest.mark.parametrize("max_num_batched_tokens", [64, 3])
def test_drafts_what_the_model_chooses_under_the_shared_noise(
    params: SamplingParams,
    max_num_batched_tokens: int,
    new_drafter: NewDrafter,
    continuation: Callable[..., list[int]],
) -> None:
    """This holds with prompts in chunks, and with another sequence in the batch."""
    drafter = new_drafter(max_num_batched_tokens=max_num_batched_tokens)
    sequences = [new_sequence(params=params, seed=4), new_sequence(PROMPT[:6], params=params, seed=5)]
    assert all(drafter.admit(sequence) for sequence in sequences)
    draft_until(drafter, 8, *sequences)
    for sequence in sequences:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert sequence.draft_token_ids[:8] == continuation(prompt, 8, params, sequence.noise_key)


def test_penalties_count_the_drafts_before(new_drafter: NewDrafter) -> None:
    """A penalty too large to overcome: no token is drafted twice."""
    never_again = SamplingParams(temperature=0.0, frequency_penalty=1000.0)
    drafter, sequence = new_drafter(), new_sequence(params=never_again, window=40)
    assert drafter.admit(sequence)
    draft_until(drafter, 40, sequence)
    assert len(set(sequence.draft_token_ids)) == 40


@pytest.mark.parametrize(
    "news",
    [
        lambda drafts: drafts[:3],  # came true in part, the rest still may
        lambda drafts: drafts,
        lambda drafts: [*drafts, 7],  # the target ran past
        lambda drafts: [*drafts[:2], (drafts[2] + 1) % 512],
        lambda drafts: [(drafts[0] + 1) % 512],
        lambda drafts: [(drafts[0] + 1) % 512, 3, 1, 4, 1, 5, 9, 2, 6],
    ],
    ids=["prefix", "all", "past", "third wrong", "first wrong", "first wrong, far ahead"],
)
def test_after_news_it_drafts_as_if_it_had_never_drafted_otherwise(
    news: Callable[[list[int]], list[int]], new_drafter: NewDrafter
) -> None:
    drafter, sequence = new_drafter(), new_sequence(params=SamplingParams())
    assert drafter.admit(sequence)
    draft_until(drafter, 6, sequence)
    for _ in range(3):
        advance(drafter, sequence, news(sequence.draft_token_ids[:6]))
        draft_until(drafter, 6, sequence)
        fresh_drafter, fresh = new_drafter(), new_sequence(params=SamplingParams())
        fresh.token_ids[:] = sequence.token_ids[: sequence.num_committed]
        fresh.num_committed = sequence.num_committed
        assert fresh_drafter.admit(fresh)
        draft_until(fresh_drafter, 6, fresh)
        assert sequence.draft_token_ids[:6] == fresh.draft_token_ids[:6]


SHAPE = (-1, 0, -1, 1, 0, 2, 3, 2, 4, -1, 6, 9, 5, 10)
PENALISED = SamplingParams(temperature=0.8, frequency_penalty=0.5, repetition_penalty=1.2)


def new_tree(params: SamplingParams, seed: int = 0, tokens: list[int] = PROMPT) -> DraftSequence:
    sequence = new_sequence(tokens, params=params, seed=seed)
    sequence.shape, sequence.width = SHAPE, 3
    return sequence


def draft_trees(drafter: ModelDrafter, *sequences: DraftSequence) -> int:
    """Steps until every sequence has its proposal; returns how many it took."""
    for num_steps in range(100):
        waiting = [s for s in sequences if s.missing(drafter.max_model_len)]
        if not waiting:
            return num_steps
        for sequence in waiting:
            sequence.to_extend = sequence.missing(drafter.max_model_len)
        assert drafter.draft(waiting) == []
    raise AssertionError("no end of steps")


class TestTrees:
    @pytest.mark.parametrize("params", [GREEDY, SamplingParams(), PENALISED], ids=["greedy", "sampled", "penalised"])
    def test_children_are_the_best_tokens_under_the_noise(
        self, params: SamplingParams, new_drafter: NewDrafter, new_runner: Callable[..., ModelRunner]
    ) -> None:
        """The step drafts whole levels, with a chain in the same batch."""
        drafter, runner = new_drafter(), new_runner(4, 64)
        sampler = Sampler(runner.model.device)
        tree, chain = new_tree(params), new_sequence(PROMPT[:6], params=params)
        assert drafter.admit(tree)
        assert drafter.admit(chain)
        assert draft_trees(drafter, tree, chain) == 6
        extended = [node for node in range(-1, len(tree.parents)) if tree.children(node)]
        assert len(extended) == len({-1, *SHAPE})
        for node in extended:
            tokens = [*PROMPT, *tree.path_tokens(node)]
            logits = runner.run([Segment(tokens, 0, list(range(64)), num_logits=1)])
            request = SampleRequest(params, tree.noise_key, tokens, len(PROMPT))
            ((best, gaps),) = sampler.best_choices(logits, [request], 3)
            children = tree.children(node)
            assert [tree.token_ids[tree.num_committed + child] for child in children] == best
            assert [tree.gaps[child] for child in children] == pytest.approx(gaps, abs=1e-3)
        assert len(tree.proposal()) == len(SHAPE)

    @pytest.mark.parametrize("max_num_batched_tokens", [64, 4])
    @pytest.mark.parametrize("seed", range(3))
    def test_after_news_it_goes_on_as_if_it_had_never_drafted_otherwise(
        self, seed: int, max_num_batched_tokens: int, new_drafter: NewDrafter
    ) -> None:
        choose = random.Random(seed)
        drafter, sequence = new_drafter(max_num_batched_tokens=max_num_batched_tokens), new_tree(SamplingParams(), seed)
        assert drafter.admit(sequence)
        for _ in range(8):
            draft_trees(drafter, sequence)
            news = sequence.path_tokens(choose.randrange(-1, len(sequence.parents)))
            advance(drafter, sequence, [*news, *choose.choice([[], [choose.randrange(512)]])])
            draft_trees(drafter, sequence)
            fresh_drafter = new_drafter()
            fresh = new_tree(SamplingParams(), seed, sequence.token_ids[: sequence.num_committed])
            fresh.num_prompt_tokens = len(PROMPT)
            assert fresh_drafter.admit(fresh)
            draft_trees(fresh_drafter, fresh)
            assert sequence.proposal() == fresh.proposal()
        drafter.release(sequence)
        assert drafter.num_used_blocks == 0

    def test_a_subtree_that_came_true_is_not_computed_again(self, new_drafter: NewDrafter) -> None:
        drafter, sequence = new_drafter(), new_tree(SamplingParams())
        assert drafter.admit(sequence)
        draft_trees(drafter, sequence)
        runner_up = sequence.children(-1)[1]
        sequence.shape = (-1, 0, -1)  # the runner-up has children for it, and one grandchild
        advance(drafter, sequence, sequence.path_tokens(runner_up))
        assert draft_trees(drafter, sequence) == 0
        assert len(sequence.proposal()) == 3

    def test_tokens_that_the_filters_took_are_no_children(self, new_drafter: NewDrafter) -> None:
        drafter, sequence = new_drafter(), new_tree(SamplingParams(top_k=2))
        assert drafter.admit(sequence)
        draft_trees(drafter, sequence)
        assert max(len(sequence.children(node)) for node in range(-1, len(sequence.parents))) == 2
        assert 0 < len(sequence.proposal()) < len(SHAPE)


def test_releasing_gives_every_block_back(new_drafter: NewDrafter) -> None:
    drafter = new_drafter()
    sequences = [new_sequence(seed=seed) for seed in range(4)]
    for sequence in sequences:
        assert drafter.admit(sequence)
    draft_until(drafter, 10, *sequences[:2])
    advance(drafter, sequences[0], [1] * 20)  # beyond the blocks it was admitted with
    draft_until(drafter, 4, sequences[0])
    assert drafter.num_used_blocks > 0
    for sequence in sequences:
        drafter.release(sequence)
    assert drafter.num_used_blocks == 0
    assert drafter.admit(new_sequence())


class TestPrefixes:
    def test_a_prompt_that_was_drafted_for_is_not_computed_again(self, new_drafter: NewDrafter) -> None:
        drafter, first = new_drafter(), new_sequence()
        assert drafter.admit(first)
        draft_until(drafter, 6, first)
        again = new_sequence(seed=1)
        assert drafter.admit(again)
        drafter.release(first)
        third = new_sequence(seed=2)
        assert drafter.admit(third)
        for sequence in (again, third):
            draft_until(drafter, 6, sequence)
            assert sequence.draft_token_ids[:6] == first.draft_token_ids[:6]
            drafter.release(sequence)
        readings = {reading.name: reading.value for reading in drafter.readings()}
        assert readings["vllm:prefix_cache_hits"] == 2 * 8  # 11 tokens in blocks of 4
        assert readings["outrider_kv_blocks_used"] == 0
        assert readings["outrider_kv_blocks_cached"] == 2

    def test_drafts_are_not_shared_until_they_came_true(self, new_drafter: NewDrafter) -> None:
        drafter, sequence = new_drafter(), new_sequence()
        assert drafter.admit(sequence)
        draft_until(drafter, 9, sequence)
        tokens = list(sequence.token_ids[:18])
        hits = []
        for _ in range(2):
            before = drafter._runner.blocks.num_hit_tokens
            probe = new_sequence(tokens)
            assert drafter.admit(probe)
            hits.append(drafter._runner.blocks.num_hit_tokens - before)
            drafter.release(probe)
            advance(drafter, sequence, tokens[11:16])
            draft_until(drafter, 9, sequence)
        assert hits == [8, 16]


class TestRoom:
    def test_admission_takes_the_blocks_of_tokens_and_window(self, new_drafter: NewDrafter) -> None:
        drafter = new_drafter()
        assert drafter.admit(new_sequence([1] * 10, window=3))
        assert drafter.num_used_blocks == 4  # 13 tokens in blocks of 4

    def test_refuses_what_it_has_no_blocks_for_and_changes_nothing(self, new_drafter: NewDrafter) -> None:
        drafter = new_drafter(num_blocks=8)
        first = new_sequence()
        assert drafter.admit(first)
        used = drafter.num_used_blocks
        assert not drafter.admit(new_sequence())
        assert drafter.num_used_blocks == used
        drafter.release(first)
        assert drafter.admit(new_sequence())

    def test_refuses_sequences_beyond_its_number(self, new_drafter: NewDrafter) -> None:
        drafter = new_drafter(max_num_seqs=2)
        assert [drafter.admit(new_sequence()) for _ in range(3)] == [True, True, False]

    @pytest.mark.parametrize(("length", "is_admitted"), [(15, True), (16, False), (20, False)])
    def test_refuses_what_is_as_long_as_the_model_takes(
        self, length: int, is_admitted: bool, new_drafter: NewDrafter
    ) -> None:
        assert new_drafter(max_model_len=16).admit(new_sequence([1] * length)) is is_admitted

    def test_gives_up_a_sequence_that_cannot_grow_and_goes_on_with_the_others(self, new_drafter: NewDrafter) -> None:
        drafter = new_drafter(num_blocks=8)
        growing, other = new_sequence([1] * 10, window=2), new_sequence([1] * 10, window=6)
        assert drafter.admit(growing)  # 3 blocks
        assert drafter.admit(other)  # 4
        advance(drafter, growing, [2] * 7)  # 17 tokens: 2 blocks more, and 1 is free
        assert drafter.draft([growing, other]) == [growing]
        assert other.num_drafted == 1
        drafter.release(growing)
        draft_until(drafter, 6, other)

    def test_drafts_up_to_the_longest_sequence_of_the_model(
        self, new_drafter: NewDrafter, continuation: Callable[..., list[int]]
    ) -> None:
        drafter, sequence = new_drafter(max_model_len=256), new_sequence([3] * 250)
        assert drafter.admit(sequence)
        assert drafter.num_used_blocks == 64  # the window does not reach beyond the model's length
        draft_until(drafter, 6, sequence)
        assert len(sequence.token_ids) == 256
        assert sequence.draft_token_ids == continuation([3] * 250, 6, GREEDY, sequence.noise_key)

    def test_a_step_takes_those_first_in_line(self, new_drafter: NewDrafter) -> None:
        drafter = new_drafter(max_num_batched_tokens=4)
        sequences = [new_sequence([index + 1] * 3, seed=index) for index in range(3)]
        assert all(drafter.admit(sequence) for sequence in sequences)
        drafter.draft(sequences)
        assert [s.num_drafted for s in sequences] == [1, 0, 0]
        drafter.draft(sequences)  # 1 + 2 + the first of 3
        assert [s.num_drafted for s in sequences] == [2, 1, 0]
        drafter.draft(sequences[2:])
        assert sequences[2].num_drafted == 1


def test_a_long_prompt_leaves_others_their_rows_and_their_prompts(new_drafter: NewDrafter) -> None:
    drafter = new_drafter(num_blocks=200, max_model_len=1024, max_num_batched_tokens=32)
    known, long, short = new_sequence(), new_sequence([7] * 600), new_sequence([9] * 14, window=4)
    assert all(drafter.admit(sequence) for sequence in (long, known, short))
    draft_until(drafter, 1, known)
    assert drafter.draft([long, known, short]) == []
    assert (known.num_drafted, short.num_drafted, long.num_drafted) == (2, 1, 0)
    draft_until(drafter, 1, long)


def test_a_prompt_takes_what_the_time_allows(new_runner: Callable[..., ModelRunner]) -> None:
    limits = StepLimits(1024, 8, 512, max_prefill_seconds=1e-9)
    drafter = ModelDrafter(new_runner(4, 200), limits)
    known, sequence = new_sequence(PROMPT[:1], window=40), new_sequence([7] * 600)
    assert drafter.admit(known)
    draft_until(drafter, 20, known)  # steps of one row say what a row takes
    assert drafter.admit(sequence)
    num_steps = 0
    while not sequence.num_drafted:
        assert drafter.draft([sequence]) == []
        num_steps += 1
    assert num_steps > 20


def test_short_prompts_allow_no_long_one_that_was_never_measured(new_runner: Callable[..., ModelRunner]) -> None:
    drafter = ModelDrafter(new_runner(4, 200), StepLimits(1024, 8, 512, max_prefill_seconds=1e9))
    for _ in range(6):
        short = new_sequence(PROMPT, window=4)
        assert drafter.admit(short)
        draft_until(drafter, 1, short)
        drafter.release(short)
    sequence = new_sequence([7] * 600)
    assert drafter.admit(sequence)
    num_steps = 0
    while not sequence.num_drafted:
        assert drafter.draft([sequence]) == []
        num_steps += 1
    assert num_steps == 4  # of 64, 128, 256 and 152 tokens


def test_the_simulated_drafter_divides_its_steps_as_this_one(new_drafter: NewDrafter) -> None:
    lengths = (40, 10, 70, 3)
    rows_of_each = []
    for drafter in (
        new_drafter(max_num_batched_tokens=32),
        SimulatedDrafter(SimulationConfig(), 1000, StepLimits(4096, 8, 32)),
    ):
        sequences = [new_sequence(list(range(length, 2 * length))) for length in lengths]
        assert all(map(drafter.admit, sequences))
        rows = []
        while not all(sequence.num_drafted >= 2 for sequence in sequences):
            assert drafter.draft(sequences) == []
            rows.append(drafter.num_step_rows)
        rows_of_each.append(rows)
    assert rows_of_each[0] == rows_of_each[1]
