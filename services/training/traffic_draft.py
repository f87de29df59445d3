"""Trains a new or existing draft for a target's traffic, on the target's answers.

The loss is the cross entropy of the draft with the target, at the places of answers only. The embedding of a new draft,
which is also its output layer, starts as the first principal components of the target's embedding, so that tokens of
similar meaning start with similar vectors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.engine.model_config import ModelConfig
from services.training.attention import MASKLESS_ATTENTION
from services.training.batches import random_numbers
from services.training.log_partition import log_partition
from services.training.parallel import MaskRows, mask_rows, parallel_states
from services.training.teaching import Lesson
from services.training.trainer import Recipe, build_optimizer

_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class DraftShape:
    """The shape of a new draft; everything else is as in its target."""

    hidden_size: int = 128
    num_layers: int = 3
    intermediate_size: int = 512
    head_dim: int = 32


def new_draft(target: ModelConfig, target_embedding: Tensor, shape: DraftShape, seed: int) -> LlamaForCausalLM:
    """Returns a new draft for `target`. Raises ValueError if `shape` is impossible.

    `target_embedding`: [vocab_size, hidden_size].
    """
    if shape.hidden_size % shape.head_dim or shape.hidden_size > target_embedding.shape[1]:
        raise ValueError(
            f"a draft {shape.hidden_size} wide: its width must be a multiple of {shape.head_dim}, and at most the "
            f"target's {target_embedding.shape[1]}"
        )
    torch.manual_seed(seed)
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=target.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.hidden_size // shape.head_dim,
        num_key_value_heads=shape.hidden_size // shape.head_dim,
        head_dim=shape.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(target.eos_token_ids),
        pad_token_id=None,
        attn_implementation=MASKLESS_ATTENTION,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        table = target_embedding.float()
        table = table - table.mean(dim=0)
        _, _, directions = torch.linalg.svd(table.T @ table)
        reduced = table @ directions[: shape.hidden_size].T
        scale = config.initializer_range / reduced.std()
        model.model.embed_tokens.weight.copy_(reduced * scale)
    return model


def load_draft(folder: Path) -> LlamaForCausalLM:
    """Returns the draft in `folder`, in float32, to continue its training."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=MASKLESS_ATTENTION
    )
    return model


def train_draft(
    model: LlamaForCausalLM,
    lessons: Sequence[Lesson],
    recipe: Recipe,
    did_step: Callable[[float], object],
    *,
    num_masks: int = 0,
) -> None:
    """Trains `model` in place on the answers of `lessons`.

    A step takes `recipe.batch_size` answers of similar lengths, and calls `did_step` with its loss. With `num_masks`
    the model also learns to draft from this number of mask tokens (`model.config.pard_token`). Raises
    FloatingPointError if a loss is not finite.
    """
    optimizer = build_optimizer(model, recipe)
    order = sorted(range(len(lessons)), key=lambda index: len(lessons[index].answer.all_token_ids))
    batches = [order[start : start + recipe.batch_size] for start in range(0, len(order), recipe.batch_size)]
    model.train()
    for step in range(recipe.steps):
        if step % len(batches) == 0:
            turns = random_numbers(recipe.seed, step).permutation(len(batches))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        batch = [lessons[index] for index in batches[turns[step % len(batches)]]]
        generator = random_numbers(recipe.seed, recipe.steps + step)
        masks = [mask_rows(len(lesson.answer.token_ids), num_masks, generator) for lesson in batch]
        loss = _loss(model, batch, masks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_NORM)
        optimizer.step()
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss at step {step} is {value}: lower --learning-rate")
        did_step(value)
    model.train(False)


def _loss(model: LlamaForCausalLM, lessons: Sequence[Lesson], masks: Sequence[MaskRows]) -> Tensor:
    """Returns the mean cross entropy of a place, in nats.

    It is exact over the target's likeliest tokens, and an unbiased estimate over the others. The weights of a label add
    up to 1, so it is the logarithm of the softmax's denominator minus the weighted logits.
    """
    head = model.lm_head.weight
    if any(own.places for own in masks):
        states = torch.cat(parallel_states(model, lessons, masks, model.config.pard_token))
    else:
        states = _answer_states(model, lessons)
    pairs = [
        (lesson, [*range(len(lesson.answer.token_ids)), *own.labels])
        for lesson, own in zip(lessons, masks, strict=True)
    ]
    probabilities = torch.from_numpy(np.concatenate([lesson.probabilities[places] for lesson, places in pairs]))
    likeliest = _logits_of(states, head, [lesson.likeliest[places] for lesson, places in pairs])
    drawn = _logits_of(states, head, [lesson.drawn[places] for lesson, places in pairs])
    of_others = 1.0 - probabilities.sum(dim=-1)
    label = (probabilities * likeliest).sum(dim=-1) + of_others * drawn.mean(dim=-1)
    return (log_partition(states, head) - label).mean()


def _logits_of(states: Tensor, head: Tensor, token_ids: Sequence[npt.NDArray[np.int32]]) -> Tensor:
    """Returns the logits of `token_ids` at each place, [places, tokens per place]."""
    rows = functional.embedding(torch.from_numpy(np.concatenate(token_ids)).long(), head)
    return torch.einsum("ph,pth->pt", states, rows)


def _answer_states(model: LlamaForCausalLM, lessons: Sequence[Lesson]) -> Tensor:
    """Returns the hidden states at all places of all answers, one answer after the other, [places, hidden_size]."""
    rows = [lesson.answer.all_token_ids[:-1] for lesson in lessons]
    width = max(map(len, rows))
    # The padding after a row does not affect it, because attention is causal.
    inputs = torch.tensor([[*row, *(0,) * (width - len(row))] for row in rows])
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    return torch.cat(
        [
            hidden[index, len(row) - len(lesson.answer.token_ids) : len(row)]
            for index, (row, lesson) in enumerate(zip(rows, lessons, strict=True))
        ]
    )


def answer_logits(model: LlamaForCausalLM, lessons: Sequence[Lesson]) -> Tensor:
    """Returns the draft's logits at all places, answer by answer, [places, vocab_size]."""
    logits: Tensor = model.lm_head(_answer_states(model, lessons))
    return logits
