"""A decoder of the Llama kind (Touvron et al., arXiv 2302.13971) over a paged KV cache, and its form in PyTorch.

A forward pass takes a packed batch: no padding, no attention mask over sequences. All shapes are [num_tokens, ...].
There are two other forms: `triton_model.py` records steps and has kernels for attention and for invariant numerics;
`cpu_model.py` computes a pass in one call of its kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from cluster.engine.attention import GatheredAttention
from cluster.engine.batch import Batch
from cluster.engine.kv_cache import KVCache
from cluster.engine.linear import TorchWeightFormat
from cluster.engine.model_config import AFTER_NORM, ModelConfig
from cluster.engine.rope import rotary_table
from cluster.engine.weights import ModelWeights, WeightFormat


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of the first layer, in place of those that a decoder computes from its embeddings.

    Contiguous, and of the dtype of the model's activations.
    """

    residual: torch.Tensor  # [num_tokens, hidden_size]: what the layer's outputs are added to
    attention: torch.Tensor  # [num_tokens, in_features of the layer's `qkv`]


class Model(ABC):
    """A decoder in one of its forms, bound to weights in its format and to a KV cache of the same dtype."""

    weight_format: ClassVar[WeightFormat]
    is_invariant: ClassVar[bool]  # whether a row has the same bits for any batch and any division of the work
    activations: ClassVar[torch.dtype | None] = None  # dtype of `LayerInputs`; None: that of the weights
    records_steps: ClassVar[bool] = False  # whether `prepare` records steps, which take memory; bursts need them

    def __init__(self, config: ModelConfig, weights: ModelWeights, kv_cache: KVCache) -> None:
        self.config = config
        self.dtype = weights.dtype
        self.device = weights.device
        self.num_bytes_read = weights.num_bytes_read
        self._weights = weights
        self._kv_cache = kv_cache

    @classmethod
    def supports(cls, config: ModelConfig, dtype: torch.dtype) -> bool:
        """Returns True if this form can compute the model."""
        return True

    def prepare(self, max_rows: int, max_context: int) -> None:  # noqa: B027
        """Compiles and records steps of up to `max_rows` rows and `max_context` tokens before any step is timed.

        The cache must be empty.
        """

    def _capture(self, layer: int, hidden: torch.Tensor, batch: Batch) -> None:
        """Stores `hidden` [num_tokens, hidden_size], the state after `layer` layers, if it is to be captured."""
        states = self._kv_cache.states
        if states is not None:
            for place, captured in enumerate(self.config.captured_layers):
                if captured == layer:
                    start = place * self.config.hidden_size
                    states[:, start : start + self.config.hidden_size].index_copy_(0, batch.slots, hidden)

    @abstractmethod
    def forward(self, batch: Batch, inputs: LayerInputs | None = None) -> torch.Tensor:
        """Runs a step: writes the KV and the captured states of every row of `batch` to the cache.

        `inputs`: if not None, the tokens of `batch` are not read.

        Returns the logits of the batch's logit rows, float32 [num_logit_rows, vocab_size].
        """


class TorchModel(Model):
    """A decoder in PyTorch's operators, for every device. Products choose their kernel by the number of rows.

    The arithmetic is that of `transformers`: norms and rotary angles in float32.
    """

    weight_format: ClassVar[WeightFormat] = TorchWeightFormat()
    is_invariant = False

    def __init__(self, config: ModelConfig, weights: ModelWeights, kv_cache: KVCache) -> None:
        super().__init__(config, weights, kv_cache)
        self._angles = {config.rope_of(layer): self._table(layer) for layer in range(config.num_layers)}

    def _table(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and signed sin, [max_position_embeddings, 1, head_dim] each, by which heads are rotated."""
        cos, sin = rotary_table(self.config, layer)
        both = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        cos, signed_sin = (table[:, None].to(self.device, self.dtype) for table in both)
        return cos, signed_sin

    @torch.inference_mode()
    def forward(self, batch: Batch, inputs: LayerInputs | None = None) -> torch.Tensor:
        weights, kv_cache = self._weights, self._kv_cache
        attention = GatheredAttention(batch, kv_cache.block_size)
        angles = {rope: (cos[batch.positions], sin[batch.positions]) for rope, (cos, sin) in self._angles.items()}
        hidden = F.embedding(batch.token_ids, weights.embedding) if inputs is None else inputs.residual
        for index, layer in enumerate(weights.layers):
            self._capture(index, hidden, batch)
            qkv = layer.qkv(self._norm(hidden, layer.input_norm) if inputs is None or index else inputs.attention)
            query, keys, values = self._rotated_heads(qkv, layer.qk_norm, *angles[self.config.rope_of(index)])
            kv_cache.write(index, keys, values, batch.slots)
            span = self.config.attention_span(index)
            attended = attention.attend(query, kv_cache.keys[index], kv_cache.values[index], span)
            hidden = hidden + self._norm(layer.output(attended.flatten(1)), layer.output_norm)

            gate, up = layer.gate_up(self._norm(hidden, layer.post_attention_norm)).chunk(2, dim=-1)
            activated = F.gelu(gate, approximate="tanh") if self.config.has_gelu else F.silu(gate)
            hidden = hidden + self._norm(layer.down(activated * up), layer.down_norm)
        self._capture(len(weights.layers), hidden, batch)
        if self.config.captures_end:
            self._capture(AFTER_NORM, self._norm(hidden, weights.norm), batch)
        return weights.head(self._norm(hidden[batch.logit_rows], weights.norm)).float()

    def _rotated_heads(
        self, qkv: torch.Tensor, qk_norm: torch.Tensor | None, cos: torch.Tensor, signed_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns query, keys and values of `qkv`, [num_tokens, heads, head_dim] each.

        Query and keys are normed and rotated.
        """
        config = self.config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        # Queries and keys are adjacent, so one norm and one rotation process both.
        to_rotate, values = heads[:, : -config.num_kv_heads], heads[:, -config.num_kv_heads :]
        if qk_norm is not None:
            to_rotate = self._norm(to_rotate, qk_norm)
        turned = to_rotate.roll(config.head_dim // 2, dims=-1)
        rotated = to_rotate * cos + turned * signed_sin
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], values

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else rms_norm(x, weight, self.config.rms_norm_eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the norm of each row of `x` (Zhang and Sennrich, arXiv 1910.07467), computed in float32."""
    return (weight * F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype)).to(x.dtype)
