"""Restricts a draft model's choices to tokens of the target."""

from __future__ import annotations

import torch

from cluster.vocabulary_map import VocabularyMap


class Proposable:
    """Removes tokens that the target lacks from logits on one device. Without a map it removes nothing."""

    def __init__(self, vocabulary: VocabularyMap | None, device: torch.device) -> None:
        self._num_ids = None if vocabulary is None else vocabulary.num_ids
        self._lacking: torch.Tensor | None = None
        if vocabulary is not None and vocabulary.lacking:
            self._lacking = torch.tensor(vocabulary.lacking, device=device)

    @torch.inference_mode()  # the model computes logits in this mode, too
    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the target's IDs, a view of `logits` [num_rows, draft's vocabulary].

        The logits of tokens that the draft lacks become -inf.
        """
        if self._num_ids is not None and self._num_ids < logits.shape[1]:
            logits = logits[:, : self._num_ids]
        return logits if self._lacking is None else logits.index_fill_(1, self._lacking, -torch.inf)
