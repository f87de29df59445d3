"""The MTP module of MiMo drafts the same tokens as a reference in plain PyTorch operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.engine.loader import load_model
from cluster.engine.model import Model
from cluster.engine.mtp import load_mtp_head
from cluster.errors import ConfigurationError
from tests.cluster.drafters.eagle_pair import CPU, FORMS, K, Pair, reference_drafts
from tests.cluster.engine.eagle_heads import TARGET_LAYERS, Tensors
from tests.cluster.engine.further_heads import save_mtp_target
from tests.cluster.engine.tokens import random_tokens


@pytest.fixture(scope="module")
def qwen_folder(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(family="qwen2", num_hidden_layers=TARGET_LAYERS)


@pytest.fixture
def target(qwen_folder: Path, tmp_path: Path) -> tuple[Path, Tensors]:
    """A target with a module, and the module's tensors."""
    return tmp_path, save_mtp_target(tmp_path, qwen_folder)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_drafts_are_those_of_the_module_written_out(form: type[Model], target: tuple[Path, Tensors]) -> None:
    folder, tensors = target
    pair = Pair(folder, folder, form, load_mtp_head)
    texts = [random_tokens(seed, length) for seed, length in ((1, 23), (2, 40), (3, 2))]
    sequences = [pair.open(text, wire_id) for wire_id, text in enumerate(texts, start=1)]
    assert pair.draft(*sequences) == [reference_drafts("mtp", tensors, folder, text) for text in texts]
    for accepted in (2, 0, K):
        for sequence in sequences:
            pair.commit(sequence, [*sequence.draft_token_ids[:accepted], 7])
        assert pair.draft(*sequences) == [
            reference_drafts("mtp", tensors, folder, sequence.token_ids[: sequence.num_committed])
            for sequence in sequences
        ]


def test_a_target_without_module_is_refused(qwen_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no MTP module"):
        load_mtp_head(qwen_folder, load_model(qwen_folder, torch.float32, CPU))
