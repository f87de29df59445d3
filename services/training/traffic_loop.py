"""The training loop over answers, for drafts and heads."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from services.training.recipe import Recipe, build_optimizer, random_numbers
from services.training.traffic import RecordedAnswer

Backward = Callable[[Sequence[int], np.random.Generator], float]
"""Computes the loss of the answers with these indices, and its gradients. Returns the loss."""


def train_on_answers(
    model: nn.Module,
    answers: Sequence[RecordedAnswer],
    recipe: Recipe,
    backward: Backward,
    did_step: Callable[[float], object],
) -> None:
    """Trains `model` in place.

    A step takes `recipe.batch_size` answers of similar lengths, and calls `did_step` with its loss. Raises
    FloatingPointError if a loss is not finite.
    """
    optimizer = build_optimizer(model, recipe)
    order = sorted(range(len(answers)), key=lambda index: len(answers[index].all_token_ids))
    batches = [order[start : start + recipe.batch_size] for start in range(0, len(order), recipe.batch_size)]
    model.train()
    for step in range(recipe.steps):
        if step % len(batches) == 0:
            turns = random_numbers(recipe.seed, step).permutation(len(batches))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        optimizer.zero_grad(set_to_none=True)
        loss = backward(batches[turns[step % len(batches)]], random_numbers(recipe.seed, recipe.steps + step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_gradient_norm)
        optimizer.step()
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss at step {step} is {loss}: lower --learning-rate")
        did_step(loss)
    model.train(False)
