"""A burst drafts what step after step drafts, and leaves the same in the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.drafters.base import DraftSequence
from cluster.drafters.burst import Burst
from cluster.drafters.model import ModelDrafter
from cluster.engine.limits import StepLimits
from cluster.engine.loader import load_model
from cluster.engine.runner import ModelRunner
from cluster.engine.triton_model import TritonModel
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.triton_sampler import HAS_FILTER
from cluster.vocabulary_map import VocabularyMap
from tests.cluster.conftest import TINY_VOCAB_SIZE
from tests.interpreter import spare_bookkeeping
from tests.near_pairs import word_tokenizer
from tests.soak import length, only_in_soak

CPU = torch.device("cpu")
LIMITS = StepLimits(max_model_len=48, max_num_seqs=6, max_num_batched_tokens=64)
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.3, min_p=0.01),
]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_bookkeeping(monkeypatch)


class Pair:
    """A drafter with bursts and one without, with the same sequences."""

    def __init__(
        self, folder: Path, vocabulary: VocabularyMap | None = None, context_tokens: int | None = None
    ) -> None:
        self.num_runs = 0
        self.drafters = []
        for has_burst in (True, False):
            runner = ModelRunner(load_model(folder, torch.float32, CPU, form=TritonModel), 4, 96)
            assert isinstance(runner.model, TritonModel)
            burst = Burst(runner.model, LIMITS, lambda call: call, vocabulary) if has_burst else None
            self.drafters.append(ModelDrafter(runner, LIMITS, burst, vocabulary, context_tokens=context_tokens))
            if has_burst:
                self._count_runs(runner)
        self.sequences: list[list[DraftSequence]] = [[], []]

    def _count_runs(self, runner: ModelRunner) -> None:
        run = runner.run

        def counted(segments: object) -> torch.Tensor:
            self.num_runs += 1
            return run(segments)  # type: ignore[arg-type]

        runner.run = counted  # type: ignore[method-assign,assignment]

    def open(self, tokens: list[int], params: SamplingParams, k: int, seed: int, num_added: int = 0) -> None:
        for drafter, sequences in zip(self.drafters, self.sequences, strict=True):
            key = NoiseKey.derive(seed, 0)
            sequence = DraftSequence(list(tokens), len(tokens), params, key, k, window=10, num_added=num_added)
            assert drafter.admit(sequence)
            sequences.append(sequence)

    def draft(self) -> list[list[int]]:
        """Until all proposals are complete; they are equal."""
        drafted = []
        for drafter, sequences in zip(self.drafters, self.sequences, strict=True):
            while waiting := [s for s in sequences if s.missing(LIMITS.max_model_len)]:
                assert drafter.draft(waiting) == []
            drafted.append([s.draft_token_ids for s in sequences])
        assert drafted[0] == drafted[1]
        return drafted[0]

    def commit(self, news: list[list[int]]) -> None:
        for drafter, sequences in zip(self.drafters, self.sequences, strict=True):
            for sequence, tokens in zip(sequences, news, strict=True):
                kept = sequence.commit(sequence.base, tokens)
                assert kept is not None
                drafter.rewind(sequence, kept)


@pytest.fixture
def pair(tiny_folder: Callable[..., Path]) -> Pair:
    return Pair(tiny_folder())


def test_rounds(pair: Pair) -> None:
    """Chains of different length; some come true, some do not, and one goes on past a block's end."""
    for seed, params in enumerate(PARAMS):
        pair.open([5, 17, 300, 42, 9][: seed + 2], params, 2 + seed, seed)
    for part in length((0.5,), (1.0, 0.5, 0.0)):
        runs_before = pair.num_runs
        drafts = pair.draft()
        assert [len(tokens) for tokens in drafts] == [2, 3, 4, 5]
        assert pair.num_runs == runs_before + 1
        pair.commit([[*tokens[: int(part * len(tokens))], 11 + i] for i, tokens in enumerate(drafts)])
    pair.draft()


@only_in_soak
def test_rows_that_pad_a_step_have_no_filters(pair: Pair) -> None:
    """A step without filters has no cuts, which a row with filters would read."""
    for params, number in ((SamplingParams(top_k=3), 4), (SamplingParams(), 3)):
        for seed in range(number):
            pair.open([7, 8, 9 + seed], params, 3, seed)
        pair.draft()
        for drafter, sequences in zip(pair.drafters, pair.sequences, strict=True):
            for sequence in sequences:
                drafter.release(sequence)
            sequences.clear()
    burst = pair.drafters[0]._burst
    assert burst is not None
    assert not burst._table.rows[3:4, HAS_FILTER].any()


@only_in_soak
def test_at_the_longest_sequence(pair: Pair) -> None:
    """A sequence ends at the longest length, while another in the batch goes on."""
    pair.open([3] * 45, PARAMS[1], 8, 1)
    pair.open([4] * 3, PARAMS[1], 8, 2)
    assert [len(tokens) for tokens in pair.draft()] == [3, 8]
    pair.open([7] * 5, PARAMS[0], 6, 3)
    pair.draft()


def test_prompts_that_are_read_in_part(tiny_folder: Callable[..., Path]) -> None:
    """One prompt is longer than the draft's context, and one is read whole."""
    pair = Pair(tiny_folder(), context_tokens=6)
    for seed, (params, number) in enumerate(zip(PARAMS[: length(2, 4)], (90, 5, 31, 17), strict=False)):
        pair.open([(7 * i + seed) % 500 for i in range(number)], params, 2 + seed, seed)
    for _ in range(length(1, 2)):
        pair.commit([[*tokens[:1], 11 + i] for i, tokens in enumerate(pair.draft())])
    pair.draft()


@only_in_soak
def test_penalties_are_drafted_step_by_step(pair: Pair) -> None:
    pair.open([3, 4, 5], SamplingParams(temperature=0.8, repetition_penalty=1.3), 3, 1)
    pair.draft()
    assert pair.num_runs == 3


def test_of_a_draft_with_other_tokens(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A burst proposes no token that the target lacks, and uses the noise of the target's positions."""
    words = {f"w{i}": i for i in range(TINY_VOCAB_SIZE)}
    target = word_tokenizer(tmp_path / "target", {f"w{i}": i for i in range(TINY_VOCAB_SIZE // 2) if i % 3})
    vocabulary = VocabularyMap(target, word_tokenizer(tmp_path / "draft", words), TINY_VOCAB_SIZE)
    pair = Pair(tiny_folder(), vocabulary)
    some = PARAMS[: length(2, 4)]
    for seed, params in enumerate(some):
        pair.open([5, 17, 200, 43, 8], params, 5, seed, num_added=seed)
    drafted = {token for tokens in pair.draft() for token in tokens}
    assert drafted.isdisjoint(vocabulary.lacking)
    assert max(drafted) < vocabulary.num_ids < TINY_VOCAB_SIZE
    pair.commit([[11 + i] for i in range(len(some))])
    pair.draft()
