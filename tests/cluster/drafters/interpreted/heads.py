"""EAGLE heads draft with the kernels for GPUs what they draft in plain operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.engine.triton_model import TritonModel
from tests.cluster.drafters.eagle_pair import Pair, reference_drafts
from tests.cluster.engine.eagle_heads import TARGET_LAYERS, save_head
from tests.cluster.engine.tokens import random_tokens
from tests.interpreter import spare_bookkeeping
from tests.soak import length


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_bookkeeping(monkeypatch)


@pytest.mark.parametrize("published", length(["eagle3"], ["eagle", "eagle3"]))
def test_a_head_drafts_in_triton(published: str, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    target_folder = tiny_folder(num_hidden_layers=TARGET_LAYERS)
    tensors = save_head(tmp_path, published)
    pair = Pair(target_folder, tmp_path, TritonModel)
    sequence = pair.open(random_tokens(1, 23))
    for _ in range(length(1, 2)):
        expected = reference_drafts(published, tensors, target_folder, list(sequence.token_ids))
        (drafts,) = pair.draft(sequence)
        assert drafts == expected
        pair.commit(sequence, [*drafts[:2], 7])
