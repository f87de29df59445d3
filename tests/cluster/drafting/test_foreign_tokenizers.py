"""Proposals of draft workers whose model reads and drafts text in the tokens of another tokenizer than the target's."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.drafters.parallel import ParallelDrafter
from cluster.drafters.translating import TranslatingDrafter
from cluster.model_folder import resolve_model_folder
from cluster.speculation.params import SamplingParams
from cluster.tokenization import Tokenizer
from cluster.vocabulary_map import VocabularyMap
from cluster.wire.messages import SpeculateRequest
from tests.near_pairs import DRAFT, TARGET, foreign

from .test_vocabularies import TEXT, TREE, K, Worker, rounds, with_mask


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign(DRAFT, tmp_path_factory.mktemp("pair") / "draft")


@pytest.fixture(scope="module")
def target() -> Tokenizer:
    return Tokenizer(resolve_model_folder(TARGET))


@pytest.fixture(scope="module")
def text(target: Tokenizer) -> list[int]:
    """Returns TEXT, special tokens and characters of several bytes as the target's tokens."""
    return target.encode("<|im_start|>" + TEXT + " naïve 日本 🎉<|im_end|>\n" + TEXT + "):\n    pass\n")


@pytest.fixture(scope="module")
def lacking(draft: Path, target: Tokenizer) -> set[int]:
    """Returns the target's tokens that the draft lacks."""
    return {*VocabularyMap(target, Tokenizer(draft), 4096).lacking, *range(1500, 4096)}


def test_proposals_are_the_targets_tokens_of_the_drafted_text(
    draft: Path, text: list[int], lacking: set[int], target: Tokenizer
) -> None:
    """They include tokens that the draft lacks, and are cut as the target's tokenizer cuts text."""
    proposals = [
        drafts.token_ids
        for temperature in (0.0, 1.0)
        for drafts in rounds(Worker(draft), text, SamplingParams(temperature=temperature), None)
    ]
    assert all(len(token_ids) == K for token_ids in proposals)
    assert lacking & {token_id for token_ids in proposals for token_id in token_ids}
    as_encoded = [token_ids == target.encode(target.decode(token_ids)) for token_ids in proposals]
    assert sum(as_encoded) > 0.7 * len(as_encoded)


@pytest.mark.parametrize("window", [K, 2 * K + 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rejected_draft_leaves_no_trace(temperature: float, window: int, draft: Path, text: list[int]) -> None:
    """The cache goes back to the first token that the draft's tokenizer now cuts differently."""
    params = SamplingParams(temperature=temperature)
    worker = Worker(draft)
    proposal = worker.open(text[:8], params, window=window)
    num_rejected = 0
    for end in range(9, len(text)):
        is_rejected = proposal.token_ids[:1] != text[end - 1 : end]
        proposal = worker.advance(end - 1, text[end - 1 : end])
        if is_rejected and end % 5 == 0:
            num_rejected += 1
            fresh = Worker(draft).open(text[:end], params, window=window, num_generated=end - 8)
            assert proposal == fresh
    assert num_rejected > 5


@pytest.mark.parametrize("context_tokens", [1, 9])
def test_few_tokens_are_read(context_tokens: int, draft: Path, text: list[int]) -> None:
    """A drafter whose drafts were rejected proposes the same as one that never drafted these."""
    params, settings, start = SamplingParams(temperature=1.0), f"draft.context_tokens={context_tokens}", 60
    worker, other = Worker(draft, TARGET, settings), Worker(draft, TARGET, settings, "draft.max_model_len=64")
    worker.open(text[:start], params)
    other.open(text[:start], params)
    for base in range(start, len(text) - 1):
        proposal = worker.advance(base, text[base : base + 1])
        if base % 7 == 0:
            assert other.advance(start, text[start : base + 1]) == proposal
    (cache,) = worker.drafter._caches.values()
    assert cache.tokens.num_skipped > 0


def test_a_full_context_begins_again(draft: Path, text: list[int]) -> None:
    params, settings, max_model_len = SamplingParams(temperature=1.0), "draft.context_tokens=9", 32
    worker = Worker(draft, TARGET, settings, f"draft.max_model_len={max_model_len}")
    worker.open(text[:20], params)
    (cache,) = worker.drafter._caches.values()
    for base in range(20, len(text) - 1):
        proposal = worker.advance(base, text[base : base + 1])
        before, (cache,) = cache, worker.drafter._caches.values()
        if before is not cache:
            fresh = Worker(draft, TARGET, settings).open(text[: base + 1], params, num_generated=base - 19)
            assert proposal == fresh
            break
    assert before is not cache


def test_accepted_drafts_are_kept(draft: Path, text: list[int]) -> None:
    worker = Worker(draft)
    first = worker.open(text[:8], SamplingParams(temperature=0.0), window=4 * K).token_ids
    for _ in range(8):
        worker.worker.step()
    num_steps = worker.worker.step_time.num_steps
    assert len(worker.advance(8, first)) == K
    (wasted,) = (r.value for r in worker.worker.readings() if r.labels.get("outcome") == "wasted")
    assert wasted == 0
    assert worker.worker.step_time.num_steps <= num_steps + 1  # a step to run ahead


def test_a_tree_is_a_chain(draft: Path, text: list[int]) -> None:
    params = SamplingParams(temperature=1.0)
    chain = Worker(draft).open(text[:20], params)
    tree = Worker(draft).open(text[:20], params, TREE)
    assert tree.parents is None or list(tree.parents) == list(range(-1, len(tree) - 1))
    assert tree.token_ids == chain.token_ids[: len(tree)]
    assert len(tree) == 3  # the depth of TREE


def test_penalties_and_filters_apply_to_the_targets_tokens(draft: Path, text: list[int]) -> None:
    params = SamplingParams(temperature=1.0, top_k=1, frequency_penalty=1000.0, logit_bias=((4000, -50.0),))
    for drafts in rounds(Worker(draft), text[:40], params, None):
        assert len({*drafts.token_ids}) >= K - 1


def test_a_bias_of_an_id_without_a_token_is_ignored(draft: Path, text: list[int]) -> None:
    """Models have more rows than their tokenizers have tokens, and requests may name every row."""
    without = Worker(draft).open(text, SamplingParams(temperature=0.0))
    biased = SamplingParams(temperature=0.0, logit_bias=((5000, 50.0),))
    assert Worker(draft).open(text, biased).token_ids == without.token_ids


def test_the_prefix_cache_keeps_certain_tokens_only(draft: Path, text: list[int]) -> None:
    """A sequence that begins like another one gets the proposals that it would get alone."""
    params = SamplingParams(temperature=0.0)
    worker = Worker(draft)
    rounds(worker, text, params, None)
    for end in range(20, len(text), 7):
        assert worker.open(text[:end], params) == Worker(draft).open(text[:end], params)
    worker.worker.receive(1, SpeculateRequest(closes={1}))
    worker.worker.step()
    assert worker.drafter.num_used_blocks == 0


def test_the_share_of_common_tokens_is_measured(draft: Path, text: list[int], lacking: set[int]) -> None:
    worker = Worker(draft)
    rounds(worker, text, SamplingParams(), None)
    committed = text[8 : 8 + 3 * len(range(8, len(text) - 3, 3))]
    share = sum(token_id not in lacking for token_id in committed) / len(committed)
    assert 0.5 < share < 1.0
    assert worker.coverage == pytest.approx(share)


def test_drafts_in_one_pass_are_common_tokens(draft: Path, text: list[int], lacking: set[int], tmp_path: Path) -> None:
    """Only the drafter `model` drafts text in its own tokens."""
    masked = with_mask(foreign(DRAFT, tmp_path / "d"), 301)
    worker = Worker(masked, TARGET, "draft.drafter=parallel")
    assert isinstance(worker.drafter, ParallelDrafter)
    assert isinstance(Worker(draft).drafter, TranslatingDrafter)
    for drafts in rounds(worker, text, SamplingParams(temperature=1.0), None):
        assert lacking.isdisjoint(drafts.token_ids)
