"""Compares a vLLM engine as the drafter with the PyTorch engine's drafter, with the same model in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.config.workers import DraftConfig
from cluster.drafters.base import DraftSequence
from cluster.drafters.model import ModelDrafter
from cluster.engine.limits import StepLimits
from cluster.engine.prompt_pace import PromptPace
from cluster.engine.runner import ModelRunner
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.tokenization import Tokenizer
from cluster.vllm.drafter import VllmDrafter
from cluster.vllm.engine_args import set_environment
from cluster.vocabulary_map import VocabularyMap
from services.held_out import held_out_texts
from tests.near_pairs import word_tokenizer

GREEDY = SamplingParams(temperature=0.0)
MAX_LEN, MAX_SEQS, BLOCK, NUM_BLOCKS = 256, 4, 32, 24
BLOCK_BYTES = 2 * 2 * 3 * 64 * 4 * BLOCK  # keys and values, layers, heads, head dimension, float32
MODEL = "outrider-draft-2m"
CONFIG = DraftConfig(
    drafter="vllm",
    model=MODEL,
    dtype="float32",
    block_size=BLOCK,
    kv_cache_bytes=(NUM_BLOCKS + 1) * BLOCK_BYTES,
    max_model_len=MAX_LEN,
    max_num_seqs=MAX_SEQS,
    max_num_batched_tokens=64,
    engine_args={"enforce_eager": True},
)


@pytest.fixture(scope="module")
def drafter(own_environment: None) -> VllmDrafter:
    set_environment(CONFIG)
    return VllmDrafter(CONFIG)


@pytest.fixture(autouse=True)
def _nothing_is_left(drafter: VllmDrafter) -> Iterator[None]:
    yield
    for sequence in list(drafter._reserved):
        drafter.release(sequence)
    assert drafter.num_used_blocks == 0
    assert drafter.free_tokens == NUM_BLOCKS * BLOCK


@pytest.fixture(scope="module")
def model_drafter() -> ModelDrafter:
    """With room to spare."""
    ours = CONFIG.model_copy(update={"drafter": "model", "engine_args": {}})
    return ModelDrafter(ModelRunner.from_config(ours), StepLimits(MAX_LEN, 64, 64))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer(resolve_model_folder(MODEL))
    return [tokenizer.encode(text.text)[:40] for text in held_out_texts() if len(text.text) > 1000]


def new_sequence(
    tokens: list[int], *, params: SamplingParams = GREEDY, seed: int = 0, window: int = 10
) -> DraftSequence:
    key = NoiseKey.derive(seed, 0)
    return DraftSequence(list(tokens), len(tokens), params, key, num_owed=4, window=window)


def draft_until(drafter: VllmDrafter | ModelDrafter, num_drafts: int, *sequences: DraftSequence) -> int:
    """Steps until every sequence has `num_drafts` drafts; returns how many it took."""
    for num_steps in range(1000):
        waiting = [s for s in sequences if s.num_drafted < num_drafts]
        if not waiting:
            return num_steps
        assert drafter.draft(waiting) == []
    raise AssertionError("no end of steps")


def advance(drafter: VllmDrafter, sequence: DraftSequence, news: list[int]) -> None:
    kept = sequence.commit(sequence.num_committed, news)
    assert kept is not None
    drafter.rewind(sequence, kept)


def num_agreeing(drafts: list[int], others: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(drafts, others, strict=True)) if a != b), len(drafts))


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=0.8, frequency_penalty=0.5, repetition_penalty=1.2),
    ],
    ids=["greedy", "sampled", "filtered", "penalised"],
)
def test_it_drafts_what_the_same_model_on_the_other_engine_drafts(
    params: SamplingParams, drafter: VllmDrafter, model_drafter: ModelDrafter, prompts: list[list[int]]
) -> None:
    """Up to near-ties, after which the texts differ: nearly all of the drafts."""
    num_agreed = 0
    ours, theirs = ([new_sequence(prompts[i], params=params, seed=i) for i in range(4)] for _ in range(2))
    for sequence, other in zip(ours, theirs, strict=True):
        assert drafter.admit(sequence)
        assert model_drafter.admit(other)
    draft_until(drafter, 12, *ours)
    draft_until(model_drafter, 12, *theirs)
    for sequence, other in zip(ours, theirs, strict=True):
        num_agreed += num_agreeing(sequence.draft_token_ids[:12], other.draft_token_ids[:12])
        model_drafter.release(other)
    assert num_agreed >= 36  # of 48


def test_a_step_extends_all_sequences_that_ask_and_no_others(drafter: VllmDrafter, prompts: list[list[int]]) -> None:
    sequences = [new_sequence(prompts[i][:10]) for i in range(4)]
    assert all(drafter.admit(sequence) for sequence in sequences)
    assert drafter.draft(sequences) == []  # 40 tokens: one step
    assert [s.num_drafted for s in sequences] == [1, 1, 1, 1]
    for _ in range(3):
        drafter.draft(sequences[1:3])
    assert [s.num_drafted for s in sequences] == [1, 4, 4, 1]
    drafter.draft(sequences)
    assert [s.num_drafted for s in sequences] == [2, 5, 5, 2]


@pytest.mark.parametrize(
    "news",
    [
        lambda drafts: drafts[:3],  # came true in part, the rest still may
        lambda drafts: drafts,
        lambda drafts: [*drafts, 7],  # the target ran past
        lambda drafts: [*drafts[:2], (drafts[2] + 1) % 4096],
        lambda drafts: [(drafts[0] + 1) % 4096],
        lambda drafts: [(drafts[0] + 1) % 4096, 3, 1, 4, 1, 5, 9, 2, 6],
    ],
    ids=["prefix", "all", "past", "third wrong", "first wrong", "first wrong, far ahead"],
)
def test_after_news_it_drafts_as_if_it_had_never_drafted_otherwise(
    news: Callable[[list[int]], list[int]], drafter: VllmDrafter, prompts: list[list[int]]
) -> None:
    num_agreed = 0
    sequence = new_sequence(prompts[0], params=SamplingParams())
    assert drafter.admit(sequence)
    draft_until(drafter, 6, sequence)
    for _ in range(3):
        advance(drafter, sequence, news(sequence.draft_token_ids[:6]))
        draft_until(drafter, 6, sequence)
        fresh = new_sequence(sequence.token_ids[: sequence.num_committed], params=SamplingParams())
        assert drafter.admit(fresh)
        draft_until(drafter, 6, fresh)
        num_agreed += num_agreeing(sequence.draft_token_ids[:6], fresh.draft_token_ids[:6])
        drafter.release(fresh)
    assert num_agreed >= 13  # of 18: near-ties aside


def test_what_came_true_goes_on_without_another_prompt(drafter: VllmDrafter, prompts: list[list[int]]) -> None:
    sequence = new_sequence(prompts[1])
    assert drafter.admit(sequence)
    draft_until(drafter, 8, sequence)
    num_queried = drafter._scheduler.num_queried_tokens
    for _ in range(3):
        advance(drafter, sequence, sequence.draft_token_ids[:4])
        assert draft_until(drafter, 8, sequence) == 4
    assert drafter._scheduler.num_queried_tokens == num_queried


def test_a_round_that_went_otherwise_computes_its_new_tokens_and_at_most_a_block(
    drafter: VllmDrafter, prompts: list[list[int]]
) -> None:
    sequence = new_sequence([*prompts[2], *prompts[3]])
    assert drafter.admit(sequence)
    draft_until(drafter, 4, sequence)
    before = drafter._scheduler.num_queried_tokens, drafter._scheduler.num_hit_tokens
    advance(drafter, sequence, [*sequence.draft_token_ids[:2], 7])
    assert draft_until(drafter, 1, sequence) == 1
    num_queried = drafter._scheduler.num_queried_tokens - before[0]
    num_hits = drafter._scheduler.num_hit_tokens - before[1]
    assert num_queried == 83
    assert num_queried - num_hits <= BLOCK


def test_a_sequence_may_be_drafted_for_at_another_temperature(drafter: VllmDrafter, prompts: list[list[int]]) -> None:
    warm, cold = SamplingParams(temperature=3.0), SamplingParams(temperature=0.0)
    sequence, greedy = new_sequence(prompts[4], params=warm), new_sequence(prompts[4], params=cold)
    assert drafter.admit(sequence)
    assert drafter.admit(greedy)
    draft_until(drafter, 2, sequence)
    advance(drafter, sequence, [*prompts[4][:3]])
    sequence.params = cold
    advance(drafter, greedy, [*prompts[4][:3]])
    draft_until(drafter, 6, sequence, greedy)
    assert num_agreeing(sequence.draft_token_ids[:6], greedy.draft_token_ids[:6]) >= 3


class TestRoom:
    def test_admission_takes_the_blocks_of_tokens_and_window(self, drafter: VllmDrafter) -> None:
        assert drafter.admit(new_sequence([1] * 60, window=5))
        assert drafter.free_tokens == (NUM_BLOCKS - 3) * BLOCK

    def test_refuses_what_it_has_no_blocks_for_and_changes_nothing(self, drafter: VllmDrafter) -> None:
        sequences = [new_sequence([1] * 250) for _ in range(3)]
        assert all(drafter.admit(sequence) for sequence in sequences)
        assert drafter.free_tokens == 0
        assert not drafter.admit(new_sequence([1, 2, 3]))
        drafter.release(sequences[0])
        assert drafter.admit(new_sequence([1, 2, 3]))

    def test_refuses_sequences_beyond_its_number(self, drafter: VllmDrafter) -> None:
        assert [drafter.admit(new_sequence([1])) for _ in range(5)] == [True] * 4 + [False]
        assert drafter.free_tokens == 0

    @pytest.mark.parametrize(("length", "is_admitted"), [(MAX_LEN - 1, True), (MAX_LEN, False), (MAX_LEN + 9, False)])
    def test_refuses_what_is_as_long_as_the_model_takes(
        self, length: int, is_admitted: bool, drafter: VllmDrafter
    ) -> None:
        assert drafter.admit(new_sequence([1] * length)) is is_admitted

    def test_gives_up_a_sequence_that_cannot_grow_and_goes_on_with_the_others(self, drafter: VllmDrafter) -> None:
        full = [new_sequence([i] * 250) for i in range(1, 3)]
        growing, other = new_sequence([1] * 90, window=6), new_sequence([1] * 120, window=6)
        assert all(drafter.admit(sequence) for sequence in (*full, growing, other))  # 8 + 8 + 3 + 4 blocks of 24
        draft_until(drafter, 1, growing)
        advance(drafter, growing, [2] * 60)
        assert drafter.draft([growing, other]) == [growing]
        drafter.release(growing)
        draft_until(drafter, 6, other)

    def test_drafts_up_to_the_longest_sequence_of_the_model(
        self, drafter: VllmDrafter, prompts: list[list[int]]
    ) -> None:
        sequence = new_sequence([*prompts[0]] * 6 + prompts[1][:12])
        assert len(sequence.token_ids) == 252
        assert drafter.admit(sequence)
        draft_until(drafter, 4, sequence)
        assert len(sequence.token_ids) == MAX_LEN
        assert drafter.num_used_blocks == 0  # nothing can come after it
        advance(drafter, sequence, [7])
        draft_until(drafter, 3, sequence)

    def test_blocks_in_use_are_those_of_the_engine(self, drafter: VllmDrafter, prompts: list[list[int]]) -> None:
        sequence = new_sequence(prompts[0])
        assert drafter.admit(sequence)
        draft_until(drafter, 1, sequence)
        readings = {reading.name: reading.value for reading in drafter.readings()}
        assert readings["outrider_kv_blocks_used"] == drafter.num_used_blocks == 2
        assert readings["outrider_kv_blocks"] == NUM_BLOCKS


def test_a_model_that_vllm_does_not_run_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("unknown")
    (folder / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "no-such-type"}')
    with pytest.raises(ConfigurationError, match=r"vLLM cannot run .*unknown"):
        VllmDrafter(CONFIG.model_copy(update={"model": str(folder)}))


def test_a_token_that_the_target_lacks_ends_a_proposal(
    drafter: VllmDrafter, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows, known = drafter.vocab_size, 600
    draft, target = (word_tokenizer(tmp_path / str(n), {f"w{i}": i for i in range(n)}) for n in (num_rows, known))
    monkeypatch.setattr(drafter, "vocabulary", VocabularyMap(target, draft, num_rows))
    sequences = [new_sequence(prompt, params=SamplingParams()) for prompt in prompts[:3]]
    for sequence in sequences:
        assert drafter.admit(sequence)
        while sequence.num_drafted < 10 and not sequence.is_exhausted:
            assert drafter.draft([sequence]) == []
        assert all(token < known for token in sequence.draft_token_ids)
    assert any(sequence.is_exhausted for sequence in sequences)
    ended = next(sequence for sequence in sequences if sequence.is_exhausted)
    advance(drafter, ended, [7])
    assert not ended.is_exhausted
    drafter.draft([ended])
    assert ended.num_drafted == 1 or ended.is_exhausted


def test_short_prompts_do_not_wait_for_long_ones(drafter: VllmDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 64 tokens: without turns the long prompts would have all of the first eight steps."""
    monkeypatch.setattr(drafter._scheduler, "pace", PromptPace(None, 64))
    long, other, short = new_sequence([7] * 250), new_sequence([8] * 250), new_sequence([9] * 20)
    for sequence in (long, other, short):
        assert drafter.admit(sequence)
    num_steps = draft_until_first(drafter, short, long, other)
    assert num_steps <= 3
    assert (long.num_drafted, other.num_drafted) == (0, 0)
    draft_until(drafter, 1, long, other)


def test_a_prompt_takes_what_the_time_allows(drafter: VllmDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter._scheduler, "pace", PromptPace(1e-9, 64))
    known, sequence = new_sequence([7] * 20), new_sequence([6] * 200)
    assert drafter.admit(known)
    draft_until(drafter, 8, known)  # steps of one row say what a row takes
    assert drafter.admit(sequence)
    assert draft_until(drafter, 1, sequence) > 6


def draft_until_first(drafter: VllmDrafter, first: DraftSequence, *others: DraftSequence) -> int:
    for num_steps in range(1000):
        if first.num_drafted:
            return num_steps
        assert drafter.draft([*others, first]) == []
    raise AssertionError("no end of steps")
