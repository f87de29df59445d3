"""Draft models that read the first and the last tokens of a prompt: proposals, positions, and the KV cache."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cluster.drafters.base import DraftSequence
from cluster.drafters.model import ModelDrafter
from cluster.drafters.parallel import ParallelDrafter
from cluster.drafters.read_tokens import NUM_SINKS, ContextTokens, ReadTokens
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams

BLOCK_SIZE, NUM_TOKENS, FEW = 4, 61, 10
NUM_READ = NUM_SINKS + FEW
PROMPT = random.Random(0).choices(range(1, 512), k=NUM_TOKENS)
KEPT = PROMPT[:NUM_SINKS] + PROMPT[-FEW:]
MASK = 511
TREE = (-1, 0, -1, 1, 0, 2, 3, 2)
WARM = SamplingParams(temperature=0.8)

NewDrafter = Callable[..., ModelDrafter]


@pytest.fixture(params=["chain", "tree", "parallel"])
def form(request: pytest.FixtureRequest) -> str:
    form: str = request.param
    return form


@pytest.fixture
def new_drafter(new_runner: Callable[..., ModelRunner]) -> NewDrafter:
    def make(
        context_tokens: ContextTokens = None, form: str = "chain", max_model_len: int = 256, num_blocks: int = 96
    ) -> ModelDrafter:
        runner, limits = new_runner(BLOCK_SIZE, num_blocks), StepLimits(max_model_len, 8, 24)
        if form == "parallel":
            return ParallelDrafter(runner, limits, MASK, context_tokens=context_tokens)
        return ModelDrafter(runner, limits, context_tokens=context_tokens)

    return make


def new_sequence(
    token_ids: list[int] = PROMPT,
    form: str = "chain",
    params: SamplingParams = WARM,
    num_added: int = 0,
) -> DraftSequence:
    key, shape = NoiseKey.derive(7, 0), TREE if form == "tree" else None
    width = 2 if form == "tree" else 1
    return DraftSequence(
        list(token_ids), len(token_ids), params, key, 4, 10, shape=shape, width=width, num_added=num_added
    )


def draft(drafter: ModelDrafter, sequence: DraftSequence) -> tuple[list[int], list[int]]:
    """Steps until the proposal is complete. Returns its tokens and parents."""
    while nodes := sequence.missing(drafter.max_model_len):
        sequence.to_extend = nodes
        assert drafter.draft([sequence]) == []
    proposal = sequence.proposal()
    return list(proposal.token_ids), list(proposal.parents or ())


def advance(drafter: ModelDrafter, sequence: DraftSequence, news: list[int]) -> None:
    kept = sequence.commit(sequence.base, news)
    assert kept is not None
    drafter.rewind(sequence, kept)


def same_rounds(drafters: list[ModelDrafter], sequences: list[DraftSequence]) -> None:
    """Checks that all drafters propose the same tokens over rounds that accept a few drafts or none."""
    choose = random.Random(1)
    for _ in range(6):
        proposals = [draft(drafter, sequence) for drafter, sequence in zip(drafters, sequences, strict=True)]
        assert all(proposal == proposals[0] for proposal in proposals)
        sequence = sequences[0]
        accepted = sequence.path_tokens(choose.randrange(-1, len(sequence.parents)))
        news = [*accepted, choose.randrange(512)]
        for drafter, sequence in zip(drafters, sequences, strict=True):
            advance(drafter, sequence, news)


@pytest.mark.parametrize("context_tokens", [NUM_TOKENS - NUM_SINKS, NUM_TOKENS, 10 * NUM_TOKENS])
def test_enough_tokens_change_nothing(context_tokens: int, form: str, new_drafter: NewDrafter) -> None:
    drafters = [new_drafter(context_tokens, form), new_drafter(None, form)]
    sequences = [new_sequence(form=form) for _ in drafters]
    assert all(drafter.admit(sequence) for drafter, sequence in zip(drafters, sequences, strict=True))
    same_rounds(drafters, sequences)


def test_fewer_tokens_give_the_drafts_of_a_sequence_of_these_tokens(form: str, new_drafter: NewDrafter) -> None:
    """The noise is that of the positions in the whole sequence."""
    drafters = [new_drafter(FEW, form), new_drafter(None, form)]
    sequences = [new_sequence(form=form), new_sequence(KEPT, form, num_added=NUM_READ - NUM_TOKENS)]
    assert all(drafter.admit(sequence) for drafter, sequence in zip(drafters, sequences, strict=True))
    same_rounds(drafters, sequences)
    assert drafters[0].num_used_blocks == drafters[1].num_used_blocks
    drafters[0].release(sequences[0])
    assert drafters[0].num_used_blocks == 0


def test_penalties_count_skipped_tokens(new_drafter: NewDrafter) -> None:
    drafter, sequence = new_drafter(FEW), new_sequence(params=SamplingParams(temperature=0.0))
    assert drafter.admit(sequence)
    (token_id, *_), _ = draft(drafter, sequence)
    assert token_id not in PROMPT
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1e6)
    for prompt in (PROMPT, [*PROMPT[:NUM_SINKS], token_id, *PROMPT[NUM_SINKS:]]):
        sequence = new_sequence(prompt, params=penalised)
        assert drafter.admit(sequence)
        assert (draft(drafter, sequence)[0][0] == token_id) is (prompt == PROMPT)


class TestLongSequences:
    def test_a_sequence_may_be_longer_than_the_models_context(self, form: str, new_drafter: NewDrafter) -> None:
        max_model_len = 32
        assert not new_drafter(None, form, max_model_len).admit(new_sequence(form=form))
        drafter, sequence = new_drafter(FEW, form, max_model_len), new_sequence(form=form)
        assert drafter.admit(sequence)
        token_ids, _ = draft(drafter, sequence)
        assert token_ids

    @pytest.mark.parametrize(("few", "num_last"), [(FEW, FEW), (24, 16)])
    def test_when_its_context_is_full_the_model_begins_again(
        self, few: int, num_last: int, form: str, new_drafter: NewDrafter
    ) -> None:
        """It reads at most half of its context, so that it does not soon begin again. Its own blocks suffice."""
        max_model_len = 32
        drafter, sequence = new_drafter(few, form, max_model_len), new_sequence(form=form)
        assert drafter.admit(sequence)
        while sequence.room(max_model_len) > 1:
            advance(drafter, sequence, draft(drafter, sequence)[0][:1])
        draft(drafter, sequence)
        blocks = drafter._runner.blocks
        others = blocks.allocate(blocks.num_available_blocks)
        assert others is not None
        advance(drafter, sequence, [5])
        assert sequence.num_skipped == sequence.num_committed - NUM_SINKS - num_last
        fresh_drafter, fresh = new_drafter(num_last, form, max_model_len), new_sequence(sequence.token_ids, form)
        assert fresh_drafter.admit(fresh)
        assert draft(drafter, sequence) == draft(fresh_drafter, fresh) != ([], [])
        blocks.free(others)
        drafter.release(sequence)
        assert drafter.num_used_blocks == 0

    def test_a_sequence_without_room_to_begin_again_is_released(self, new_drafter: NewDrafter) -> None:
        """Other sequences may hold the blocks of its beginning, which do not become free then."""
        drafter, sequence = new_drafter(FEW, max_model_len=32), new_sequence()
        assert drafter.admit(sequence)
        before = sequence.num_skipped
        while sequence.num_skipped == before:
            advance(drafter, sequence, [5])
        blocks = drafter._runner.blocks
        assert blocks.allocate(blocks.num_available_blocks) is not None
        assert drafter.draft([sequence]) == [sequence]
        drafter.release(sequence)

    def test_a_prompt_takes_the_blocks_of_what_is_read(self, new_drafter: NewDrafter) -> None:
        drafter, sequence = new_drafter(FEW), new_sequence()
        assert drafter.admit(sequence)
        assert drafter.num_used_blocks == -(-(NUM_READ + sequence.window) // BLOCK_SIZE)
        assert drafter.max_tokens_read == NUM_READ
        assert new_drafter().max_tokens_read is None


class TestAuto:
    """The worker chooses how many tokens each sequence reads."""

    LONG = random.Random(1).choices(range(1, 512), k=600)

    @pytest.mark.parametrize("context_tokens", [128, 256, None])
    def test_a_sequence_has_the_drafts_of_its_choice(
        self, context_tokens: int | None, form: str, new_drafter: NewDrafter
    ) -> None:
        drafters = [new_drafter("auto", form, 1024, 200), new_drafter(context_tokens, form, 1024, 200)]
        sequences = [new_sequence(self.LONG, form) for _ in drafters]
        sequences[0].context_tokens = context_tokens
        assert all(drafter.admit(sequence) for drafter, sequence in zip(drafters, sequences, strict=True))
        assert sequences[0].num_skipped == (0 if context_tokens is None else 600 - NUM_SINKS - context_tokens)
        same_rounds(drafters, sequences)

    @pytest.mark.parametrize(("max_model_len", "num_blocks"), [(512, 200), (1024, 100)])
    def test_without_room_fewer_tokens_are_read(
        self, max_model_len: int, num_blocks: int, form: str, new_drafter: NewDrafter
    ) -> None:
        drafter, sequence = new_drafter("auto", form, max_model_len, num_blocks), new_sequence(self.LONG, form)
        assert drafter.admit(sequence)
        assert sequence.num_skipped == 600 - NUM_SINKS - 128
        assert drafter.max_tokens_read == NUM_SINKS + 128

    def test_a_full_context_begins_again(self, form: str, new_drafter: NewDrafter) -> None:
        drafter, sequence = new_drafter("auto", form, 64), new_sequence(form=form)
        assert drafter.admit(sequence)
        while not sequence.num_skipped:
            advance(drafter, sequence, [5])
        assert sequence.num_committed - sequence.num_skipped == NUM_SINKS + 32
        fresh_drafter, fresh = new_drafter(32, form, 64), new_sequence(sequence.token_ids, form)
        assert fresh_drafter.admit(fresh)
        assert draft(drafter, sequence) == draft(fresh_drafter, fresh) != ([], [])


def cache_conversation(drafter: ModelDrafter) -> None:
    """Has the drafter's prefix cache keep the first 48 tokens, of a prompt of few tokens and an answer."""
    first = new_sequence(PROMPT[:NUM_READ])
    assert drafter.admit(first)
    for token_id in PROMPT[NUM_READ:48]:
        draft(drafter, first)
        advance(drafter, first, [token_id])
    draft(drafter, first)
    drafter.release(first)


class TestPrefixCache:
    def test_sequences_with_the_same_read_tokens_share_blocks(self, new_drafter: NewDrafter) -> None:
        drafter, first = new_drafter(FEW), new_sequence()
        assert drafter.admit(first)
        draft(drafter, first)
        advance(drafter, first, [1])
        draft(drafter, first)
        other = [*PROMPT[:NUM_SINKS], *reversed(PROMPT[NUM_SINKS:-FEW]), 9, *PROMPT[-FEW:]]
        for token_ids in (other, KEPT, PROMPT):
            before = drafter._runner.blocks.num_hit_tokens
            sequence = new_sequence(token_ids)
            assert drafter.admit(sequence)
            assert drafter._runner.blocks.num_hit_tokens - before == NUM_READ // BLOCK_SIZE * BLOCK_SIZE
            fresh_drafter, fresh = new_drafter(FEW), new_sequence(token_ids)
            assert fresh_drafter.admit(fresh)
            assert draft(drafter, sequence) == draft(fresh_drafter, fresh)

    @pytest.mark.parametrize(("num_news", "is_whole"), [(FEW, True), (FEW + BLOCK_SIZE, False)])
    def test_a_cached_prompt_is_read_whole(self, num_news: int, is_whole: bool, new_drafter: NewDrafter) -> None:
        """A conversation began with few tokens and grew: a later turn computes its new tokens only."""
        drafter = new_drafter(FEW)
        cache_conversation(drafter)
        turn = new_sequence([*PROMPT[:48], *range(1, 1 + num_news)])
        assert drafter.admit(turn)
        assert (turn.num_skipped == 0) is is_whole
        whole_drafter, whole = new_drafter(None if is_whole else FEW), new_sequence(turn.token_ids)
        assert whole_drafter.admit(whole)
        assert draft(drafter, turn) == draft(whole_drafter, whole)

    def test_without_room_for_a_cached_prompt_it_is_not_read_whole(self, new_drafter: NewDrafter) -> None:
        drafter = new_drafter(FEW, num_blocks=16)
        cache_conversation(drafter)
        kept = drafter._runner.blocks.allocate(2)
        turn = new_sequence(PROMPT[:56])
        assert drafter.admit(turn)
        assert turn.num_skipped == 56 - NUM_READ
        assert kept is not None


@pytest.mark.parametrize(("num_skipped", "first_skipped"), [(0, 0), (1, 0), (3, 2), (7, 4)])
def test_read_tokens_follow_their_sequence(num_skipped: int, first_skipped: int) -> None:
    token_ids = list(range(20))
    tokens = ReadTokens(token_ids, num_skipped, first_skipped)
    for _ in range(2):
        expected = token_ids[:first_skipped] + token_ids[first_skipped + num_skipped :]
        assert list(tokens) == expected
        for start in range(len(expected) + 2):
            assert all(list(tokens[start:stop]) == expected[start:stop] for stop in range(len(expected) + 2))
        token_ids.extend([50, 51])
