"""Proposals that are made in one step, compared with steps over the whole text and its masks, without a cache."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from cluster.drafters.base import DraftSequence
from cluster.drafters.parallel import ParallelDrafter
from cluster.engine.batch import Segment
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.speculation.noise import NoiseKey, gumbel_noise
from cluster.speculation.params import SamplingParams

MASK = 511
PROMPT = [5, 17, 300, 42, 42, 9, 111, 250, 8, 77, 501]
WARM = SamplingParams(temperature=0.8)

NewDrafter = Callable[..., ParallelDrafter]
Proposal = Callable[[DraftSequence, list[int], int], list[int]]


@pytest.fixture(scope="module")
def new_drafter(new_runner: Callable[..., ModelRunner]) -> NewDrafter:
    def make(num_blocks: int = 128, max_num_batched_tokens: int = 256, max_model_len: int = 256) -> ParallelDrafter:
        limits = StepLimits(max_model_len, 8, max_num_batched_tokens)
        return ParallelDrafter(new_runner(4, num_blocks), limits, MASK)

    return make


@pytest.fixture(scope="module")
def proposal(new_runner: Callable[..., ModelRunner]) -> Proposal:
    """proposal(sequence, tokens, n): the n drafts of `sequence` after `tokens`."""
    runner = new_runner(4, 128)

    def compute(sequence: DraftSequence, tokens: list[int], n: int) -> list[int]:
        scores = runner.run([Segment([*tokens, *[MASK] * (n - 1)], 0, list(range(128)), num_logits=n)]).float()
        if not sequence.params.is_greedy:
            draws = [(sequence.noise_key, len(tokens) + place) for place in range(n)]
            scores = scores / sequence.params.temperature + torch.from_numpy(gumbel_noise(draws, scores.shape[-1]))
        drafts: list[int] = scores.argmax(dim=-1).tolist()
        return drafts

    return compute


def new_sequence(
    *, seed: int = 0, k: int = 4, window: int = 10, width: int = 1, params: SamplingParams = WARM
) -> DraftSequence:
    sequence = DraftSequence(list(PROMPT), len(PROMPT), params, NoiseKey.derive(seed, 0), k, window)
    sequence.width = width
    return sequence


def main_path(sequence: DraftSequence, node: int) -> list[int]:
    """The tokens after `node`, from first child to first child."""
    tokens = []
    while children := sequence.children(node):
        node = children[0]
        tokens.append(sequence.token_of(node))
    return tokens


def advance(drafter: ParallelDrafter, sequence: DraftSequence, news: list[int]) -> None:
    kept = sequence.commit(sequence.num_committed, news)
    assert kept is not None
    drafter.rewind(sequence, kept)


def draft(drafter: ParallelDrafter, sequence: DraftSequence, *nodes: int) -> None:
    sequence.to_extend = list(nodes)
    assert drafter.draft([sequence]) == []


@pytest.mark.parametrize("params", [WARM, SamplingParams(temperature=0.0)], ids=str)
def test_one_step_makes_the_proposal_and_a_guess_of_the_bonus_token(
    params: SamplingParams, new_drafter: NewDrafter, proposal: Proposal
) -> None:
    drafter = new_drafter()
    sequences = [new_sequence(seed=seed, params=params) for seed in range(3)]
    assert all(drafter.admit(sequence) for sequence in sequences)
    assert drafter.draft(sequences) == []
    for sequence in sequences:
        assert sequence.draft_token_ids == proposal(sequence, PROMPT, 5)
        assert sequence.missing(drafter.max_model_len) == []


def test_without_run_ahead_there_is_no_guess(new_drafter: NewDrafter) -> None:
    drafter, sequence = new_drafter(), new_sequence(window=4)
    assert drafter.admit(sequence)
    draft(drafter, sequence)
    assert sequence.num_drafted == 4


@pytest.mark.parametrize("max_num_batched_tokens", [3, 6, 14])
def test_prompts_come_in_chunks_and_masks_as_far_as_there_is_room(
    max_num_batched_tokens: int, new_drafter: NewDrafter
) -> None:
    drafter, sequence = new_drafter(max_num_batched_tokens=max_num_batched_tokens), new_sequence()
    assert drafter.admit(sequence)
    for _ in range(20):
        if missing := sequence.missing(drafter.max_model_len):
            draft(drafter, sequence, *missing)
            assert (drafter.num_step_rows or 0) <= max_num_batched_tokens
    assert sequence.num_drafted >= 4


def test_no_draft_is_beyond_the_longest_sequence(new_drafter: NewDrafter) -> None:
    drafter, sequence = new_drafter(max_model_len=len(PROMPT) + 2), new_sequence()
    assert drafter.admit(sequence)
    draft(drafter, sequence)
    assert sequence.num_drafted == 2


def test_where_blocks_are_short_it_drafts_what_it_has_room_for(new_drafter: NewDrafter) -> None:
    drafter, sequence = new_drafter(num_blocks=3), new_sequence(k=1, window=1)  # room for 12 tokens; the prompt has 11
    assert drafter.admit(sequence)
    sequence.num_owed, sequence.window = 6, 14
    draft(drafter, sequence)
    assert sequence.num_drafted == 1


def test_whatever_is_extended_and_committed_drafts_are_those_of_the_whole_text(
    new_drafter: NewDrafter, proposal: Proposal
) -> None:
    """Random leaves are extended, several in a step; then part of a path comes true, or another token is chosen."""
    for seed in range(12):
        rng = random.Random(seed)
        drafter, sequence = new_drafter(num_blocks=256), new_sequence(seed=seed, window=14, width=rng.choice((1, 2)))
        assert drafter.admit(sequence)
        for _ in range(8):
            for _ in range(rng.randint(1, 3)):
                leaves = [node for node in range(-1, len(sequence.parents)) if not sequence.children(node)]
                leaves = [node for node in leaves if sequence.depth(node) < sequence.window]
                chosen = sorted(rng.sample(leaves, min(len(leaves), rng.randint(1, 3))))
                before = {node: list(sequence.tokens_to(node)) for node in chosen}
                if not chosen:
                    break
                draft(drafter, sequence, *chosen)
                for node, tokens in before.items():
                    made = main_path(sequence, node)
                    assert made
                    assert made == proposal(sequence, tokens, len(made)), (seed, node)
            node, news = -1, []
            for _ in range(rng.randint(0, 7)):
                if not sequence.children(node):
                    break
                node = rng.choice(sequence.children(node))
                news.append(sequence.token_of(node))
            if not news or rng.random() < 0.4:
                news.append(rng.randrange(500))
            advance(drafter, sequence, news)
            sequence.num_owed = rng.randint(1, 6)
            sequence.window = 2 * sequence.num_owed + 2
            if sequence.num_committed > 200:
                break
        drafter.release(sequence)
        assert drafter.num_used_blocks == 0


def test_trees_have_the_best_tokens_of_each_depth(new_drafter: NewDrafter, proposal: Proposal) -> None:
    drafter, sequence = new_drafter(), new_sequence(k=6, window=6, width=2)
    sequence.shape = (-1, -1, 0, 0, 1, 2)
    assert drafter.admit(sequence)
    draft(drafter, sequence, -1)
    tree = sequence.proposal()
    assert tuple(tree.parents or ()) == sequence.shape
    main = proposal(sequence, PROMPT, 3)
    assert [tree.token_ids[node] for node in (0, 2, 5)] == main
    assert tree.token_ids[4] == main[1]  # of the second branch: it has the same tokens at its depth
