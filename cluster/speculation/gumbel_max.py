"""Finds the largest `x + g` of every row on a CPU. The choices are exact.

A kernel (`kernels/`) uses an upper bound of the noise `g` to find the few tokens that can win, and computes the noise
for these tokens only. It runs on the calling thread: 64 rows of 4,096 tokens take 0.3 ms, little compared with a step
of 64 rows.
"""

from __future__ import annotations

import struct

import torch

try:
    from cluster.speculation import _sampling
except ImportError:  # there was no C compiler at installation
    _sampling = None  # type: ignore[assignment]

MAX_WIDTH = 16  # as in sampling.h

_RUN = struct.Struct("qqQQQd")


def has_kernel() -> bool:
    """Returns whether the kernel was built."""
    return _sampling is not None


def pack_run(
    logits: int, num_rows: int, key_low: int, key_high: int, first_position: int, temperature: float, /
) -> bytes:
    """Returns a packed Run of `sampling.h`: rows that draw at consecutive positions with one key.

    `logits` is the address of float32 [num_rows, vocab_size]. At temperature 0 there is no noise.
    """
    return _RUN.pack(logits, num_rows, key_low, key_high, first_position, temperature)


def draw(runs: bytes, num_rows: int, vocab_size: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the best `width` IDs of every row, int64, and their scores, float32, both [num_rows, width].

    The best ID comes first; among equal scores the lowest ID comes first. If a row has fewer than `width` scores above
    -inf, the remaining scores are -inf and their IDs are meaningless. But if a row has no score above -inf, its first
    ID is 0.
    """
    assert 0 < width <= min(vocab_size, MAX_WIDTH)
    ids = torch.empty(num_rows, width, dtype=torch.int64)
    scores = torch.empty(num_rows, width)
    _sampling.draw(runs, vocab_size, width, ids.data_ptr(), scores.data_ptr())
    return ids, scores
