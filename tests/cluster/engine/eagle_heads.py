"""Random EAGLE heads in the published formats, and a reference computation of EAGLE and MTP drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 32
VOCAB, DRAFT_VOCAB, TARGET_LAYERS = 512, 320, 8
THETA, EPS = 10000.0, 1e-6
FORMATS = ("eagle", "eagle with biases", "eagle3", "eagle3 of one state", "speculators", "speculators with norms")

Tensors = dict[str, Tensor]


def save_head(folder: Path, form: str, seed: int = 0, max_len: int = 16) -> Tensors:
    """Writes a random head for a target of `tiny_folder(num_hidden_layers=TARGET_LAYERS)`; returns its tensors.

    `max_len`: number of positions that it names, by default fewer than tests draft at.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def norm(size: int = HIDDEN) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    is_third = not form.startswith("eagle ") and form != "eagle"
    layer = "midlayer" if form.startswith("eagle3") else "layers.0"
    inputs = 2 * HIDDEN if is_third else HIDDEN
    tensors = {
        f"{layer}.self_attn.q_proj.weight": randn(HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.k_proj.weight": randn(KV_HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.v_proj.weight": randn(KV_HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.o_proj.weight": randn(HIDDEN, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": randn(INTERMEDIATE, HIDDEN),
        f"{layer}.mlp.up_proj.weight": randn(INTERMEDIATE, HIDDEN),
        f"{layer}.mlp.down_proj.weight": randn(HIDDEN, INTERMEDIATE),
        f"{layer}.post_attention_layernorm.weight": norm(),
    }
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": max_len,
        "vocab_size": VOCAB,
        "model_type": "llama",
        "hidden_act": "silu",
    }
    config: dict[str, object] = {"architectures": ["LlamaForCausalLM"], **sizes}
    if not is_third:
        tensors["fc.weight"] = randn(HIDDEN, 2 * HIDDEN)
        if form == "eagle with biases":
            tensors["fc.bias"] = randn(HIDDEN)
    else:
        kept = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
        tensors |= {
            f"{layer}.hidden_norm.weight": norm(),
            f"{layer}.input_layernorm.weight": norm(),
            "norm.weight": norm(),
            "lm_head.weight": randn(DRAFT_VOCAB, HIDDEN),
            "d2t": kept - torch.arange(DRAFT_VOCAB),
            "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True),
        }
        config |= {"draft_vocab_size": DRAFT_VOCAB}
        if form == "eagle3 of one state":
            config["eagle_config"] = {"use_aux_hidden_state": False}
        else:
            tensors["fc.weight"] = randn(HIDDEN, 3 * HIDDEN)
    if form.startswith("speculators"):
        tensors["embed_tokens.weight"] = randn(VOCAB, HIDDEN)
        config = {
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT_VOCAB,
            "transformer_layer_config": sizes,
        }
        config["speculators_config"] = {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
        }
        config |= {"norm_before_residual": form == "speculators", "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
        if form == "speculators with norms":
            tensors |= {f"fc_norm.{index}.weight": norm() for index in range(3)}
            config |= {"fc_norm": True, "norm_output": True}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if form.startswith("eagle "):
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def captured_layers(form: str) -> tuple[int, ...]:
    """Returns how many layers precede each state that a head of `form` reads; -1: the state after the last norm."""
    if form == "mtp":
        return (TARGET_LAYERS,)
    if form.startswith("speculators"):
        return 1, 3, 5
    return (2, 4, 5) if form == "eagle3" else (-1,)


def draft_logits(
    form: str, tensors: Tensors, embedding: Tensor, head: Tensor, states: Tensor, token_ids: Sequence[int], num: int
) -> list[Tensor]:
    """Returns the logits [VOCAB] of `num` greedy drafts after `token_ids`, each computed from the beginning.

    `states` [len(token_ids) - 1, number of captured states * HIDDEN]: the target's, of all tokens but the last.
    """
    embedding = tensors.get("embed_tokens.weight", embedding)
    is_third = "norm.weight" in tensors
    layer = "model.mtp_layers.0" if form == "mtp" else "midlayer" if form.startswith("eagle3") else "layers.0"
    named = {name.removeprefix(f"{layer}."): tensor for name, tensor in tensors.items()}
    read = states
    if is_third and "fc.weight" in named:
        if "fc_norm.0.weight" in named:
            parts = [_norm(part, named[f"fc_norm.{i}.weight"]) for i, part in enumerate(states.chunk(3, dim=-1))]
            read = torch.cat(parts, dim=-1)
        read = read @ named["fc.weight"].T
    tokens = list(token_ids)
    found: list[Tensor] = []
    own: list[Tensor] = []  # the head's outputs, in place of states that the target does not have yet
    for _ in range(num):
        inputs = torch.cat([read, *(state[None] for state in own)])
        embedded = embedding[tokens[1:]]
        if is_third:
            normed = _norm(inputs, named["hidden_norm.weight"])
            attention = torch.cat([_norm(embedded, named["input_layernorm.weight"]), normed], dim=-1)
            residual = normed if form == "speculators" else inputs
        elif form == "mtp":
            halves = [_norm(inputs, named["hidden_layernorm.weight"]), _norm(embedded, named["token_layernorm.weight"])]
            residual = torch.cat(halves, dim=-1) @ named["input_proj.weight"].T
            attention = _norm(residual, named["input_layernorm.weight"])
        else:
            attention = torch.cat([embedded, inputs], dim=-1) @ named["fc.weight"].T + named.get("fc.bias", 0.0)
            residual = attention
        hidden = residual + _attend(attention, named)
        normed = _norm(hidden, named["post_attention_layernorm.weight"])
        gate = F.silu(normed @ named["mlp.gate_proj.weight"].T) * (normed @ named["mlp.up_proj.weight"].T)
        last = (hidden + gate @ named["mlp.down_proj.weight"].T)[-1]
        norm = named.get("final_layernorm.weight" if form == "mtp" else "norm.weight")
        output = last if norm is None else _norm(last, norm)
        if is_third:
            logits = torch.full((VOCAB,), -torch.inf)
            logits[named["d2t"] + torch.arange(DRAFT_VOCAB)] = named["lm_head.weight"] @ output
        else:
            logits = head @ output
        found.append(logits)
        own.append(output if form in ("mtp", "speculators with norms") else last)
        tokens.append(int(logits.argmax()))
    return found


def _attend(x: Tensor, named: Tensors) -> Tensor:
    query, keys, values = (
        F.linear(x, named[f"self_attn.{name}_proj.weight"], named.get(f"self_attn.{name}_proj.bias"))
        .unflatten(-1, (-1, HEAD_DIM))
        .transpose(0, 1)
        for name in "qkv"
    )
    frequencies = THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(len(x)).float(), frequencies).repeat(1, 2)

    def rotated(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        return heads * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    attended = F.scaled_dot_product_attention(
        rotated(query)[None], rotated(keys)[None], values[None], is_causal=True, enable_gqa=True
    )
    return attended[0].transpose(0, 1).flatten(1) @ named["self_attn.o_proj.weight"].T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)
