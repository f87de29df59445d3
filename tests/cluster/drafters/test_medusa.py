"""Medusa heads of every published format draft the same tokens as a reference in plain PyTorch operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.drafters.base import DraftSequence
from cluster.drafting.worker import DraftWorker
from cluster.engine.loader import load_model
from cluster.engine.medusa import load_medusa_heads, read_medusa_names
from cluster.engine.model import Model, TorchModel
from cluster.engine.model_config import AFTER_NORM
from cluster.errors import ConfigurationError
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest
from cluster.wire.messages import Open, SpeculateReply, SpeculateRequest
from tests.cluster.drafters.eagle_pair import CPU, FORMS, LIMITS, K, Pair, check_without_states, ends_of, states_of
from tests.cluster.engine.further_heads import MEDUSA_FORMATS, NUM_HEADS, medusa_logits, save_medusa_heads
from tests.cluster.engine.tokens import random_tokens

Logits = Callable[[list[int]], list[torch.Tensor]]


@pytest.fixture(scope="module")
def target_folder(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder()


def _pair(target_folder: Path, folder: Path, published: str, form: type[Model]) -> tuple[Pair, Logits]:
    """Saves heads in `folder`. Returns a pair with them, and a function from tokens to the logits of each head."""
    tensors, (_, output) = save_medusa_heads(folder, published), ends_of(target_folder)

    def logits(token_ids: list[int]) -> list[torch.Tensor]:
        return medusa_logits(tensors, output, states_of(target_folder, token_ids[:-1], (AFTER_NORM,))[-1])

    return Pair(target_folder, folder, form, load_medusa_heads), logits


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("published", MEDUSA_FORMATS)
def test_drafts_are_those_of_the_heads_written_out(
    published: str, form: type[Model], target_folder: Path, tmp_path: Path
) -> None:
    pair, logits = _pair(target_folder, tmp_path, published, form)
    texts = [random_tokens(seed, length) for seed, length in ((1, 23), (2, 40), (3, 2))]
    sequences = [pair.open(text, wire_id, k=wire_id + 1) for wire_id, text in enumerate(texts, start=1)]

    def expected(sequence: DraftSequence) -> list[int]:
        token_ids = sequence.token_ids[: sequence.num_committed]
        return [int(row.argmax()) for row in logits(token_ids)[: sequence.num_owed]]

    for accepted in (2, 0, 1):
        assert pair.draft(*sequences) == [expected(sequence) for sequence in sequences]
        for sequence in sequences:
            pair.commit(sequence, [*sequence.draft_token_ids[:accepted], 7])
    assert pair.drafter.num_used_blocks == 0


def test_a_tree_has_the_same_best_tokens_below_every_parent(target_folder: Path, tmp_path: Path) -> None:
    pair, logits = _pair(target_folder, tmp_path, "published", FORMS[-1])
    token_ids = random_tokens(4, 30)
    sequence = pair.open(token_ids, width=3)
    sequence.shape = (-1, -1, -1, 0, 0, 1, 3, 3, 4)
    pair.drafter.draft([sequence])
    assert not sequence.missing(LIMITS.max_model_len)
    assert not sequence.is_exhausted
    assert sequence.proposal().parents == list(sequence.shape)
    best = [row.topk(3).indices.tolist() for row in logits(token_ids)]
    for node in range(-1, len(sequence.parents)):
        children = [sequence.token_of(child) for child in sequence.children(node)]
        assert children in ([], best[sequence.depth(node)])


def test_drafts_have_the_noise_of_their_positions_and_the_parameters_of_the_request(
    target_folder: Path, tmp_path: Path
) -> None:
    pair, logits = _pair(target_folder, tmp_path, "published", FORMS[-1])
    token_ids, key = random_tokens(5, 30), NoiseKey.derive(3, 0)
    sequence = pair.open(token_ids)
    sequence.noise_key = key
    sequence.params = params = SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.3, presence_penalty=0.5)
    (drafts,) = pair.draft(sequence)
    for offset, row in enumerate(logits(token_ids)[:K]):
        # Penalties count the committed tokens. Drafts before this one are IDs that no penalty counts.
        request = SampleRequest(params, key, [*token_ids, *[len(row)] * offset], sequence.num_prompt_tokens)
        assert Sampler(CPU).sample(row[None], [request]) == [drafts[offset]]


@pytest.mark.parametrize("shape", [None, (-1, -1, 0, 2, 3, 4, 5, 6, 7)])
def test_more_tokens_than_heads_give_a_shorter_proposal_at_once(
    shape: tuple[int, ...] | None, target_folder: Path, tmp_path: Path
) -> None:
    pair, _ = _pair(target_folder, tmp_path, "published", FORMS[-1])
    token_ids, k = random_tokens(6, 20), 8
    opened = pair.open(token_ids)  # the target's states stay; the worker has a sequence of its own
    pair.drafter.release(opened)
    worker, replies = DraftWorker(pair.drafter), list[SpeculateReply]()
    opening = Open(1, token_ids, 1, opened.params, opened.noise_key, k, window=k, shape=shape)
    worker.receive(worker.attach(replies.append), SpeculateRequest(opens={1: opening}))
    worker.step()
    (reply,) = replies
    (proposal,) = reply.proposals.values()
    assert len(proposal.token_ids) == NUM_HEADS + (shape is not None)
    assert not worker.has_work


def test_without_the_targets_states_it_proposes_nothing(target_folder: Path, tmp_path: Path) -> None:
    pair, _ = _pair(target_folder, tmp_path, "published", TorchModel)
    check_without_states(pair)


def test_a_sequence_ends_at_the_models_limit(target_folder: Path, tmp_path: Path) -> None:
    pair, logits = _pair(target_folder, tmp_path, "published", TorchModel)
    pair.drafter.max_model_len = 32
    token_ids = random_tokens(7, 30)
    sequence = pair.open(token_ids)
    pair.drafter.draft([sequence])
    assert sequence.draft_token_ids == [int(row.argmax()) for row in logits(token_ids)[:2]]
    assert not sequence.missing(32)


def test_a_folder_without_heads_is_refused(target_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no Medusa heads"):
        read_medusa_names(target_folder)


def test_heads_of_another_size_are_refused(target_folder: Path, tmp_path: Path) -> None:
    save_medusa_heads(tmp_path, "published", hidden=32)
    with pytest.raises(ConfigurationError, match="has shape"):
        load_medusa_heads(tmp_path, load_model(target_folder, torch.float32, CPU))
