"""Logits to sample from."""

from __future__ import annotations

import torch


def random_logits(seed: int, num_rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
