"""Causal attention without masks, which keeps every call on the flash-attention kernel.

The ``sdpa`` attention of transformers materialises its masks when it is compiled, and the flash kernel takes no mask.
Training and generation here never pad, so no mask is needed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

MASKLESS_ATTENTION = "outrider_maskless_causal"


def maskless_causal_attention(
    module: nn.Module,
    query: Tensor,  # [rows, num_heads, query_length, head_dim]
    key: Tensor,  # [rows, num_kv_heads, key_length, head_dim]
    value: Tensor,  # [rows, num_kv_heads, key_length, head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally, unless a mask is given. With a filled cache, only a single query token is allowed."""
    assert query.shape[2] in (1, key.shape[2])
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


# Registered names are looked up by the models' configuration; one without a mask function gets no mask.
AttentionInterface.register(MASKLESS_ATTENTION, maskless_causal_attention)
