"""The paged KV cache: one pool of slots for all sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.engine import huge_pages
from cluster.engine.model_config import ModelConfig


class KVCache:
    """Keys and values of every layer, addressed by slot = block * block_size + offset.

    `keys[layer]` and `values[layer]` have shape [num_slots, num_kv_heads, head_dim]. `states` contains the hidden
    states that the configuration captures, [num_slots, state_size]; None if it captures none.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.spare_block = num_blocks  # the last block, for rows that only pad a step
        shape = (config.num_layers, (num_blocks + 1) * block_size, config.num_kv_heads, config.head_dim)
        self.keys, self.values = (_zeros(shape, dtype, device) for _ in range(2))
        self.states = _zeros((shape[1], config.state_size), dtype, device) if config.captured_layers else None

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores the rows of a step. `keys`, `values` [num_tokens, num_kv_heads, head_dim]; `slots` [num_tokens]."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copies the slots `sources` of every layer, and their states, to `destinations`.

        Reads all sources before it writes.
        """
        for cache in (self.keys, self.values):
            cache.index_copy_(1, destinations, cache.index_select(1, sources))
        if self.states is not None:
            self.states.index_copy_(0, destinations, self.states.index_select(0, sources))


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return huge_pages.zeros(shape, dtype) if device.type == "cpu" else torch.zeros(*shape, dtype=dtype, device=device)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of one block: keys, values and captured states of `block_size` tokens."""
    return (2 * config.num_layers * config.kv_size + config.state_size) * dtype.itemsize * block_size
