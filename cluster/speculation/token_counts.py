"""Counts the tokens of a sequence incrementally, so that penalties count each token only once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


class TokenCounts:
    """Counts of the first `num_counted` tokens of a sequence. Tokens outside the vocabulary are not counted."""

    __slots__ = ("generated", "in_prompt", "num_counted")

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.num_counted = 0
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.generated = torch.zeros(vocab_size, dtype=torch.float32, device=device)  # counts after the prompt

    def count(self, token_ids: Sequence[int] | npt.NDArray[np.int32], end: int, num_prompt_tokens: int) -> None:
        """Counts the tokens up to `end`. Tokens that were counted before must not have changed."""
        start, border = self.num_counted, max(self.num_counted, min(num_prompt_tokens, end))
        if start < border:
            self.in_prompt[self._tensor(token_ids[start:border])] = True
        if border < end:
            self.generated += torch.bincount(self._tensor(token_ids[border:end]), minlength=len(self.generated))
        self.num_counted = max(start, end)

    def _tensor(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> torch.Tensor:
        known = np.asarray(token_ids, dtype=np.int64)
        return torch.from_numpy(known[known < len(self.generated)]).to(self.generated.device)
