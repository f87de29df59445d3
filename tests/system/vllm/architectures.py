"""Small random checkpoints of architectures that vLLM serves on a CPU in float32.

Qwen3-Next, for one, has linear attention that needs bfloat16 there. vLLM 0.32.0 gives other tokens with those in
`REFUSED` when it verifies drafts, its own n-gram drafts too.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from cluster.model_folder import ASSETS

VOCAB_SIZE = 4096  # that of the bundled tokenizer
WINDOW = 48  # tokens: shorter than most prompts here

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_HEADS = {"head_dim": 32}
_QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_DEEPSEEK = {
    **_EXPERTS,
    "kv_lora_rank": 512,  # the published sizes: vLLM's attention has no others
    "q_lora_rank": 48,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "topk_method": "noaux_tc",
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Gemma 3": {
        "model_type": "gemma3_text",
        **_HEADS,
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
    },
    "Qwen3-MoE": {"model_type": "qwen3_moe", **_HEADS, **_QWEN_EXPERTS},
    "Mixtral": {"model_type": "mixtral", **_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "DeepSeek-V3": {"model_type": "deepseek_v3", **_DEEPSEEK},
    "Llama 4": {
        "model_type": "llama4_text",
        **_HEADS,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 128,
        "pad_token_id": 0,
    },
    "GLM-4": {"model_type": "glm4", **_HEADS, "attention_bias": True},
    "GLM-4.5": {"model_type": "glm4_moe", **_HEADS, **_EXPERTS},
    "Phi-4": {"model_type": "phi3"},
    "OLMo 2": {"model_type": "olmo2"},
    "Granite 4 hybrid": {
        "model_type": "granitemoehybrid",
        **_MAMBA,
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
        "layer_types": ["mamba", "attention"],
    },
    "Falcon-H1": {"model_type": "falcon_h1", **_HEADS, **_MAMBA, "mamba_d_ssm": 256},
}

REFUSED = ("DeepSeek-V3", "Granite 4 hybrid", "Falcon-H1")


def save_checkpoint(name: str, folder: Path) -> Path:
    """Writes the checkpoint of an architecture, with the bundled tokenizer, to `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = _SHAPE | ARCHITECTURES[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(options.pop("model_type"), **options))
    save_random(model, folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "outrider-target-12m" / file, folder / file)
    return folder


def save_random(model: Any, folder: Path) -> None:
    """Writes `model`, one of transformers, with random weights to `folder`."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # the others are norms, biases, and rates of decay, whose initial values are sane
                parameter.normal_(std=0.15, generator=generator)
            elif "norm" not in parameter_name and parameter_name.endswith("bias"):
                parameter.normal_(std=0.1, generator=generator)
    model.to(torch.float32).save_pretrained(folder)
