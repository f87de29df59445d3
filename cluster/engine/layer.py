"""The weights of one decoder layer, as the operators that run it hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.engine.linear import Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor  # [hidden_size]
    qkv: Linear  # hidden_size → q_size + 2 * kv_size
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Linear  # q_size → hidden_size
    post_attention_norm: torch.Tensor  # [hidden_size]
    gate_up: Linear  # hidden_size → 2 * intermediate_size
    down: Linear  # intermediate_size → hidden_size

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """In the order in which they run."""
        return self.qkv, self.output, self.gate_up, self.down
