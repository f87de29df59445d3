"""Random Medusa heads in the published formats, their reference computation, and targets with an MTP module."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.model_folder import resolve_model_folder
from tests.cluster.engine.eagle_heads import HIDDEN, VOCAB, Tensors

NUM_HEADS = 5
MEDUSA_FORMATS = (
    "published",
    "of two layers",
    "without biases",
    "without outputs",
    "vllm",
    "vllm of the target's output",
)


def save_medusa_heads(folder: Path, form: str, seed: int = 0, hidden: int = HIDDEN, vocab: int = VOCAB) -> Tensors:
    """Writes random heads. Returns their tensors under the names that the authors use."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    num_layers = 2 if form == "of two layers" else 1
    tensors: Tensors = {}
    for head in range(NUM_HEADS):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = randn(hidden, hidden)
            if form != "without biases":
                tensors[f"{head}.{layer}.linear.bias"] = randn(hidden)
        if form not in ("without outputs", "vllm of the target's output"):
            tensors[f"{head}.{num_layers}.weight"] = randn(vocab, hidden)
    config: dict[str, object] = {"medusa_num_heads": 2, "medusa_num_layers": 1}  # the number of heads is wrong
    folder.mkdir(parents=True, exist_ok=True)
    if form.startswith("vllm"):
        config = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": NUM_HEADS}
        config |= {"num_hidden_layers": 1, "hidden_size": hidden, "vocab_size": vocab, "medusa_fc_bias": True}
        saved = {}
        for name, tensor in tensors.items():
            head, _, *rest = name.split(".")
            saved[f"blocks.{head}.layers.0.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"] = tensor
        if form != "vllm":
            config["original_lm_head"] = True
            saved["lm_head.weight"] = torch.zeros(vocab, hidden)
        save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        prefix = "medusa_heads." if form == "without biases" else ""
        named = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
        torch.save(named, folder / ("pytorch_model.bin" if form == "of two layers" else "medusa_lm_head.pt"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tensors


def medusa_logits(tensors: Tensors, output: Tensor, state: Tensor) -> list[Tensor]:
    """Returns the logits [VOCAB] of each head. `output`: the target's layer; `state` [HIDDEN]: of the last token."""
    found: list[Tensor] = []
    for head in range(NUM_HEADS):
        hidden, layer = state, 0
        while (weight := tensors.get(f"{head}.{layer}.linear.weight")) is not None:
            hidden = hidden + F.silu(weight @ hidden + tensors.get(f"{head}.{layer}.linear.bias", 0.0))
            layer += 1
        found.append(tensors.get(f"{head}.{layer}.weight", output) @ hidden)
    return found


def save_mtp_target(folder: Path, source: Path, seed: int = 0) -> Tensors:
    """Writes the Qwen2 of `source` as a MiMo with a random module; returns the module's tensors.

    The embedding of token 0 is zero.
    """
    generator = torch.Generator().manual_seed(seed)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][0] = 0.0
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    query, keys = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {
        "input_proj.weight": (hidden, 2 * hidden),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.q_proj.bias": (query,),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm", "final_layernorm")
    shapes |= {f"{norm}.weight": (hidden,) for norm in norms}
    module = {
        f"model.mtp_layers.0.{name}": float("norm" in name) + 0.2 * torch.randn(*shape, generator=generator)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors | module, folder / "model.safetensors", metadata={"format": "pt"})
    return module


def save_bundled_target_with_mtp(folder: Path) -> None:
    """Writes the bundled target with an MTP module made from the bundled EAGLE head, so that drafts are accepted."""
    target, eagle = resolve_model_folder("outrider-target-12m"), resolve_model_folder("outrider-eagle-12m")
    shutil.copytree(target, folder, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    of_head = {name.removeprefix("layers.0."): t for name, t in load_file(eagle / "model.safetensors").items()}
    embedding, after_norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    size = len(tensors["model.layers.0.mlp.up_proj.weight"]) - len(of_head["mlp.up_proj.weight"])
    module = {name: tensor for name, tensor in of_head.items() if name.startswith("self_attn.")} | {
        # The module's layer has the target's sizes; rows and columns of zeros add nothing.
        "mlp.gate_proj.weight": F.pad(of_head["mlp.gate_proj.weight"], (0, 0, 0, size)),
        "mlp.up_proj.weight": F.pad(of_head["mlp.up_proj.weight"], (0, 0, 0, size)),
        "mlp.down_proj.weight": F.pad(of_head["mlp.down_proj.weight"], (0, size)),
        "post_attention_layernorm.weight": of_head["post_attention_layernorm.weight"],
        "input_proj.weight": torch.cat(of_head["fc.weight"].chunk(2, dim=1)[::-1], dim=1),
        # Norms that change little but the scale: EAGLE reads the state after the norm, and has no norms of its own.
        "hidden_layernorm.weight": after_norm,
        "token_layernorm.weight": torch.full_like(after_norm, embedding.float().pow(2).mean().sqrt().item()),
        "input_layernorm.weight": torch.ones_like(after_norm),
        "final_layernorm.weight": torch.ones_like(after_norm),
    }
    named = {
        f"model.mtp_layers.0.{name}": tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in module.items()
    }
    save_file(tensors | named, folder / "model.safetensors", metadata={"format": "pt"})
