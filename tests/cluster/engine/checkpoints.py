"""Tiny checkpoints that between them use everything in which the supported families differ."""

from __future__ import annotations

from typing import Any

# Over 32 dimensions, frequencies lie on both sides of every bound.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

LONG_ROPE = {  # over 3/4 of 16 dimensions
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0 + 0.3 * i for i in range(6)],
}

# Options of `tiny_folder`.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama 2": {},
    "llama 3": {"rope_parameters": LLAMA3_ROPE, "tied": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama, linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    "llama, dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}},
    "mistral": {"family": "mistral", "sliding_window": None, "max_shard_size": "100KB"},
    "mistral with a window": {"family": "mistral", "sliding_window": 11},
    "qwen2": {"family": "qwen2", "max_shard_size": "100KB"},
    "qwen2, tied": {"family": "qwen2", "tied": True},
    "qwen2 with a window in one layer": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 19,
        "max_window_layers": 1,
    },
    "phi4": {"family": "phi3", "max_shard_size": "100KB"},
    "phi4, mini": {
        "family": "phi3",
        "tied": True,
        "head_dim": 16,
        "original_max_position_embeddings": 16,
        "rope_parameters": LONG_ROPE,
        "sliding_window": 60,
    },
    "gemma3": {
        "family": "gemma3_text",
        "tied": True,
        "num_hidden_layers": 3,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
    },
    "qwen3": {"family": "qwen3", "tied": True, "max_shard_size": "100KB"},
    "qwen3 with biases, yarn": {"family": "qwen3", "attention_bias": True, "rope_parameters": YARN_ROPE},
}
