"""Training batches: windows of token streams, drawn as a pure function of (seed, step).

No state is kept between steps, so a resumed run gets the same batches as one that was not interrupted.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bench.factory.tokens import TokenArray
from services.training.recipe import random_numbers


class BatchSource(Protocol):
    def batch(self, step: int) -> Tensor:
        """Return the windows of one step: [rows, length + 1] int64, inputs and shifted labels."""


def to_device(tokens: TokenArray, device: torch.device) -> Tensor:
    """Copy tokens to the device in a type that torch can index there."""
    return torch.from_numpy(tokens.astype(np.int32)).to(device)


class StreamWindows:
    """Windows at uniformly drawn positions of one token stream."""

    def __init__(self, stream: Tensor, batch_size: int, sequence_length: int, seed: int) -> None:
        if len(stream) <= sequence_length:
            raise ValueError(f"{len(stream)} tokens are too few for windows of {sequence_length}")
        self._stream = stream
        self._batch_size = batch_size
        self._offsets = torch.arange(sequence_length + 1, device=stream.device)
        self._num_starts = len(stream) - sequence_length
        self._seed = seed

    def batch(self, step: int) -> Tensor:
        starts = random_numbers(self._seed, step).integers(self._num_starts, size=self._batch_size)
        positions = torch.from_numpy(starts).to(self._stream.device)[:, None] + self._offsets
        return self._stream[positions].long()


class SampledRows:
    """Randomly drawn rows of samples, about ``tokens_per_batch`` tokens in each batch."""

    def __init__(self, rows: Tensor, tokens_per_batch: int, seed: int) -> None:
        self._rows = rows
        self._batch_size = max(1, tokens_per_batch // rows.shape[1])
        self._seed = seed

    def batch(self, step: int) -> Tensor:
        chosen = random_numbers(self._seed, step).integers(len(self._rows), size=self._batch_size)
        return self._rows[torch.from_numpy(chosen).to(self._rows.device)].long()


class MixedBatches:
    """Batches of the corpus, some of them replaced by batches of samples.

    From ``first_mixed_step`` on, each batch is taken from the samples with the probability ``sample_fraction``.
    """

    def __init__(
        self,
        corpus: BatchSource,
        samples: BatchSource,
        sample_fraction: float,
        first_mixed_step: int,
        seed: int,
    ) -> None:
        self._corpus = corpus
        self._samples = samples
        self._sample_fraction = sample_fraction
        self._first_mixed_step = first_mixed_step
        self._seed = seed

    def batch(self, step: int) -> Tensor:
        # The sources use this step's generator, too; another key keeps the choice independent.
        choice = random_numbers(self._seed + 1, step).random()
        is_mixed = step >= self._first_mixed_step and choice < self._sample_fraction
        return (self._samples if is_mixed else self._corpus).batch(step)


def evaluation_batches(stream: Tensor, batch_size: int, sequence_length: int, limit_tokens: int) -> list[Tensor]:
    """Return evenly spaced windows of a stream, in batches of equal shape.

    They have at most about ``limit_tokens`` tokens. Raises ValueError if the stream is too short for a window.
    """
    num_windows = (len(stream) - 1) // sequence_length
    num_kept = min(num_windows, max(1, limit_tokens // sequence_length))
    batch_size = min(batch_size, num_kept)
    num_kept -= num_kept % batch_size
    if num_kept == 0:
        raise ValueError(f"{len(stream)} held-out tokens are too few for a window")
    starts = torch.linspace(0, num_windows - 1, num_kept, dtype=torch.float64).long()
    positions = (starts * sequence_length)[:, None] + torch.arange(sequence_length + 1)
    windows = stream[positions.to(stream.device)].long()
    return list(torch.split(windows, batch_size))
