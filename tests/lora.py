"""LoRA adapters for tests: random ones, as PEFT saves them, and models into which one is merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cluster.model_folder import resolve_model_folder
from cluster.vllm.target.adapter_folder import CONFIG_FILE, WEIGHTS_FILE

BASE = "outrider-target-12m"
_MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def write_adapter(
    folder: Path,
    seed: int,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    strength: float = 0.8,
    hidden_size: int | None = None,
    modules: tuple[str, ...] = _MODULES,
    **config: Any,
) -> Path:
    """A random adapter of the bundled target. With this `strength` its answers soon differ from the target's."""
    of_base = json.loads((resolve_model_folder(BASE) / "config.json").read_text())
    hidden = hidden_size or of_base["hidden_size"]
    queries = of_base["head_dim"] * of_base["num_attention_heads"]
    values = of_base["head_dim"] * of_base["num_key_value_heads"]
    sizes = {  # inputs, outputs
        "self_attn.q_proj": (hidden, queries),
        "self_attn.v_proj": (hidden, values),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, of_base["intermediate_size"]),
        "mlp.down_proj": (of_base["intermediate_size"], hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(of_base["num_hidden_layers"]):
        for module in modules:
            inputs, outputs = sizes.get(module, (hidden, hidden))
            name = f"base_model.model.model.layers.{layer}.{module}"
            scale = strength * rank / alpha / rank**0.5
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * scale
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
    }
    (folder / CONFIG_FILE).write_text(json.dumps(said | config))
    return folder


def merge(adapter: Path, folder: Path) -> Path:
    """A copy of the bundled target, in float32, to whose weights the adapter's are added."""
    base = resolve_model_folder(BASE)
    shutil.copytree(base, folder)
    weights = {name: weight.float() for name, weight in load_file(base / "model.safetensors").items()}
    said, tensors = json.loads((adapter / CONFIG_FILE).read_text()), load_file(adapter / WEIGHTS_FILE)
    for name, a in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            delta = (b.double() @ a.double()) * (said["lora_alpha"] / said["r"])
            weights[f"{module}.weight"] = (weights[f"{module}.weight"].double() + delta).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
