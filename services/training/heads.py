"""Shared by the trainable heads on hidden states: the parts of the target that they start from, and the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.engine.loader import LoadedModel
from services.training.models import llama_config

_NUM_COMPARED = 512  # tokens per position that the loss compares
_LEAST_PROBABILITY = 1e-9  # lower bound of probabilities in the loss, because its gradient divides by them


@dataclass(frozen=True)
class TargetEnds:
    """The parts of a target from which its heads start."""

    config: LlamaConfig  # the shape of the target
    embedding: Tensor  # [vocab_size, hidden_size]
    norm: Tensor  # [hidden_size]: weight of the last norm
    output: Tensor  # [vocab_size, hidden_size]: weight of the output layer

    @classmethod
    def of(cls, target: LlamaForCausalLM) -> TargetEnds:
        model = target.model
        return cls(target.config, model.embed_tokens.weight.detach(), model.norm.weight, target.lm_head.weight.detach())

    @classmethod
    def of_engine(cls, loaded: LoadedModel) -> TargetEnds:
        """Returns the parts of a model of any family that the engine loads, in float32 on the CPU."""
        weights, size = loaded.weights, loaded.config.hidden_size
        assert weights.norm is not None
        identity = torch.eye(size, dtype=loaded.form.activations or weights.dtype, device=weights.device)
        # The stored output layer may be reordered or quantized. Products with unit vectors give its columns.
        output = weights.head(identity).T
        parts = (part.detach().float().cpu().contiguous() for part in (weights.embedding, weights.norm, output))
        return cls(llama_config(loaded.config), *parts)


class TrainableHead(nn.Module, ABC):
    """A head, or a group of Medusa heads, that drafts at every position of a text at once.

    Each position t is treated as the last one that the target has computed. Step d, from 0, predicts the token at
    t + 2 + d. The tokens of the text serve as the drafts of earlier steps.
    """

    captured_layers: tuple[int, ...]  # states of the target that the heads read, as in `ModelConfig`
    num_trained_steps: int

    @property
    @abstractmethod
    def target_ids(self) -> Tensor:
        """The target's IDs of the tokens that can be drafted, int64 [number]."""

    @abstractmethod
    def step_logits(self, embeddings: Tensor, states: Tensor, num_steps: int, positions: slice) -> Iterator[Tensor]:
        """Yields the logits of at most `num_steps` steps, each [rows, number of positions, number of `target_ids`].

        `embeddings` [rows, length, hidden_size] and `states` [rows, length, captured layers * hidden_size] are the
        target's; the states may end `num_steps` positions before the embeddings. `positions` chooses among the first
        length - `num_steps` positions, which have the embeddings of all steps.
        """


def coupled_acceptance(of_target: Tensor, of_head: Tensor, outside: Tensor) -> Tensor:
    """Returns the probability that target and head choose the same token under the same Gumbel noise, [rows].

    `of_target` and `of_head` [rows, draft_vocab_size]: probabilities of the tokens that the head has. `outside` [rows]:
    the target's probability of all other tokens. With p for the target and q for the head, the result is the sum over
    tokens i of 1 / sum_j max(p_j / p_i, q_j / q_i). With the tokens in descending order of p_j / q_j, the maximum is
    p_j / p_i for j up to i, and q_j / q_i for later j.
    """
    target, head = of_target.clamp_min(_LEAST_PROBABILITY), of_head.clamp_min(_LEAST_PROBABILITY)
    order = (target / head).argsort(dim=-1, descending=True)
    target, head = target.gather(-1, order), head.gather(-1, order)
    up_to = outside[:, None] + target.cumsum(dim=-1)
    after = (1 - head.cumsum(dim=-1)).clamp_min(0)
    return (target * head / (head * up_to + target * after)).sum(dim=-1)


def coupled_loss(logits: Tensor, of_target: Tensor) -> Tensor:
    """Returns the mean of -log(coupled acceptance) over all positions.

    `logits` and `of_target` [..., draft_vocab_size]: the head's logits and the target's probabilities of the tokens
    that the head has. To avoid sorting a large vocabulary, only the `_NUM_COMPARED` tokens that target or head find
    likeliest are compared. Any other tokens count as never accepted, so the acceptance is a lower bound.
    """
    of_target, of_head = of_target.flatten(0, -2), logits.float().softmax(dim=-1).flatten(0, -2)
    if of_head.shape[-1] > _NUM_COMPARED:
        compared = torch.maximum(of_target, of_head.detach()).topk(_NUM_COMPARED, dim=-1, sorted=False).indices
        of_target, of_head = of_target.gather(-1, compared), of_head.gather(-1, compared)
    accepted = coupled_acceptance(of_target, of_head, (1 - of_target.sum(dim=-1)).clamp_min(0))
    return -accepted.clamp_min(_LEAST_PROBABILITY).log().mean()
