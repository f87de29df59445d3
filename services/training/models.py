"""Llama models of given sizes, for training."""

from typing import Any

from torch import nn
from transformers import LlamaConfig

from cluster.engine.model_config import ModelConfig


def llama_config(model: ModelConfig, **changes: Any) -> LlamaConfig:
    """Returns the configuration of a Llama model with the sizes of `model`, except for `changes`."""
    values: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": list(model.eos_token_ids),
        "pad_token_id": None,
    }
    return LlamaConfig(**(values | changes))


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
