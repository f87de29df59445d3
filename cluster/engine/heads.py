"""Heads that are small decoders and draft from the hidden states of their target.

Row t of a head reads the target's state of token t, the embedding of token t + 1, and position t. It predicts token
t + 2. For further drafts, a row reads the output of the previous row instead of the target's state.
`cluster.engine.eagle` and `cluster.engine.mtp` read such heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cluster.engine.linear import Linear
from cluster.engine.loader import LoadedModel
from cluster.engine.model import LayerInputs, rms_norm
from cluster.engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The shape of a head."""

    decoder: ModelConfig  # layers of the head; its vocabulary is that of the head's logits
    captured_layers: tuple[int, ...]  # states of the target that the head reads, as in `ModelConfig`
    target_hidden_size: int
    is_third: bool = False  # whether the head is EAGLE-3; only then the fields below are used
    norm_before_residual: bool = False  # whether the residual input of the layer is the state after `hidden_norm`
    norm_before_fc: bool = False  # whether one norm covers all states that `fc` reads
    has_fc_norm: bool = False  # whether each state that `fc` reads has a norm of its own


@dataclass(frozen=True, slots=True)
class DecoderHead:
    """A head with its weights: `model` has its layers, the other fields compute the inputs of the first layer."""

    config: HeadConfig
    model: LoadedModel
    fc: Linear | None  # input: the target's states (EAGLE-3), or embedding and state; None: EAGLE-3 with one state
    hidden_norm: torch.Tensor | None = None  # norm of the states; None: EAGLE
    token_norm: torch.Tensor | None = None  # norm of the embeddings (MTP), which follow the states in the input of `fc`
    fc_norms: tuple[torch.Tensor, ...] = ()  # norms of the input of `fc`: one for all states, or one per state
    target_ids: torch.Tensor | None = None  # int64 [vocab_size]: target's ID of each of the head's tokens; None: equal

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """States of the target that the head reads, as in `ModelConfig`."""
        return self.config.captured_layers

    def inputs(
        self,
        token_ids: torch.Tensor,
        of_target: torch.Tensor,
        target_states: torch.Tensor,
        of_head: torch.Tensor,
        head_states: torch.Tensor,
    ) -> LayerInputs:
        """Returns the inputs for the rows of a step.

        `token_ids` int64 [num_tokens]. Rows `of_target` read `target_states` [number, target's state size], and rows
        `of_head` the head's own `head_states` [number, hidden_size].
        """
        decoder, weights = self.config.decoder, self.model.weights
        dtype = self.model.form.activations or weights.dtype
        embedded = F.embedding(token_ids, weights.embedding).to(dtype)
        states = torch.empty(len(token_ids), decoder.hidden_size, dtype=dtype, device=token_ids.device)
        states.index_copy_(0, of_head, head_states.to(dtype))
        if len(of_target):
            states.index_copy_(0, of_target, self._read(target_states.to(dtype)))
        if self.config.is_third:
            return self._third_inputs(embedded, states)
        assert self.fc is not None
        eps, input_norm = decoder.rms_norm_eps, weights.layers[0].input_norm
        halves = [embedded, states]
        if self.token_norm is not None and self.hidden_norm is not None:
            halves = [rms_norm(states, self.hidden_norm, eps), rms_norm(embedded, self.token_norm, eps)]
        hidden = self.fc(torch.cat(halves, dim=-1))
        return LayerInputs(hidden, hidden if input_norm is None else rms_norm(hidden, input_norm, eps))

    def _third_inputs(self, embedded: torch.Tensor, states: torch.Tensor) -> LayerInputs:
        input_norm, hidden_norm = self.model.weights.layers[0].input_norm, self.hidden_norm
        assert input_norm is not None
        assert hidden_norm is not None
        eps = self.config.decoder.rms_norm_eps
        normed = rms_norm(states, hidden_norm, eps)
        attention = torch.cat([rms_norm(embedded, input_norm, eps), normed], dim=-1)
        return LayerInputs(normed if self.config.norm_before_residual else states, attention)

    def _read(self, target_states: torch.Tensor) -> torch.Tensor:
        """Returns the states of the first draft, [number, hidden_size]. EAGLE-3 computes them with `fc`, if any."""
        if not self.config.is_third or self.fc is None:
            return target_states
        if self.fc_norms:
            parts = target_states.chunk(len(self.fc_norms), dim=-1)
            eps = self.config.decoder.rms_norm_eps
            normed = [rms_norm(part, weight, eps) for part, weight in zip(parts, self.fc_norms, strict=True)]
            target_states = torch.cat(normed, dim=-1)
        return self.fc(target_states)

    def of_target_ids(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Returns `logits` [num_rows, head's vocabulary], indexed by target IDs: [num_rows, vocab_size].

        Tokens that are not in the head's vocabulary get -inf.
        """
        if self.target_ids is None:
            return logits
        found = logits.new_full((len(logits), vocab_size), -torch.inf)
        return found.index_copy_(1, self.target_ids, logits)
