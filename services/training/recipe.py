"""The settings of a training, its optimizer and its random numbers."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Recipe:
    """The settings that determine the trained weights, in addition to the data and the loss."""

    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float
    seed: int
    warmup_fraction: float = 0.03
    final_learning_rate_fraction: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate: linear warm-up, then a cosine down to the final fraction."""
        warmup_steps = max(1, round(self.steps * self.warmup_fraction))
        if step < warmup_steps:
            return self.learning_rate * (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, self.steps - warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        floor = self.final_learning_rate_fraction
        return self.learning_rate * (floor + (1 - floor) * cosine)


def build_optimizer(model: nn.Module, recipe: Recipe, *, is_fused: bool = False) -> torch.optim.AdamW:
    """Returns AdamW without weight decay of norms and biases."""
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate,
        betas=recipe.betas,
        fused=is_fused,
    )


def random_numbers(seed: int, step: int) -> np.random.Generator:
    """Return a generator that depends on `seed` and `step` only."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
