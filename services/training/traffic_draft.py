"""Trains a new or existing draft for a target's traffic, on the target's answers.

The loss is the cross entropy of the draft with the target, at the places of answers only. The embedding of a new draft,
which is also its output layer, starts as the first principal components of the target's embedding, so that tokens of
similar meaning start with similar vectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from cluster.engine.model_config import ModelConfig, read_json
from cluster.errors import ConfigurationError
from services.training.attention import MASKLESS_ATTENTION
from services.training.log_partition import log_partition
from services.training.models import llama_config
from services.training.parallel import MaskRows, mask_rows, parallel_states
from services.training.recipe import Recipe
from services.training.teaching import Lesson
from services.training.traffic_loop import train_on_answers


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
    num_heads = shape.hidden_size // shape.head_dim
    config = llama_config(
        target,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
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
    """Returns the draft in `folder`, in float32, to continue its training.

    Raises ConfigurationError if it is not a Llama model with all its weights, such as a head.
    """
    architectures = read_json(folder / "config.json").get("architectures")
    if architectures != ["LlamaForCausalLM"]:
        raise ConfigurationError(
            f"{folder}: config.json has architectures {architectures}; a draft to start from needs LlamaForCausalLM"
        )
    loaded: Any = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=MASKLESS_ATTENTION, output_loading_info=True
    )
    model: LlamaForCausalLM = loaded[0]
    loading: dict[str, Any] = loaded[1]
    if loading["missing_keys"]:
        raise ConfigurationError(
            f"{folder} lacks weights of the model: {', '.join(sorted(loading['missing_keys'])[:3])}"
        )
    mask = getattr(model.config, "pard_token", None)
    if mask is not None and not (isinstance(mask, int) and 0 <= mask < model.config.vocab_size):
        raise ConfigurationError(f"{folder}: config.json has pard_token {mask!r}, which is no token of the model")
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

    If `num_masks` is not 0, the model also learns to draft from this number of mask tokens
    (`model.config.pard_token`). `did_step` and errors: see `train_on_answers`.
    """

    def backward(chosen: Sequence[int], generator: np.random.Generator) -> float:
        batch = [lessons[index] for index in chosen]
        masks = [mask_rows(len(lesson.answer.token_ids), num_masks, generator) for lesson in batch]
        loss = _loss(model, batch, masks)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    train_on_answers(model, [lesson.answer for lesson in lessons], recipe, backward, did_step)


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
