"""Checkpoints whose projections are stored quantized, and the weights that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"Tensors of a projection by the ends of their names, and the weight [num_outputs, num_inputs] in float32."

GROUP = 32
AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]  # the output at each place of a word


@dataclass(frozen=True)
class Kind:
    config: Mapping[str, Any]  # its quantization_config
    store: Callable[[torch.Tensor], Stored]


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs unsigned `numbers` [rows, n] into int32 words [rows, n * bits / 32], lowest bits first."""
    shifts = torch.arange(0, 32, bits)
    words = (numbers.long().view(len(numbers), -1, len(shifts)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def integers(
    weight: torch.Tensor, bits: int, *, symmetric: bool, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns unsigned values [outputs, inputs], scales and zeros [outputs, groups], and each input's group."""
    num_outputs, num_inputs = weight.shape
    groups = (torch.arange(num_inputs) if order is None else order) // GROUP
    values = torch.empty(num_outputs, num_inputs)
    scales, zeros = torch.empty(num_outputs, num_inputs // GROUP), torch.empty(num_outputs, num_inputs // GROUP)
    most = 2**bits - 1
    for group in range(num_inputs // GROUP):
        part = weight[:, groups == group]
        if symmetric:
            scale = part.abs().amax(1) / (most // 2)
            zero = torch.full_like(scale, (most + 1) // 2)
        else:
            low = part.amin(1).clamp(max=0)
            scale = (part.amax(1).clamp(min=0) - low) / most
            zero = (-low / scale).round()
        scale = scale.half().float()
        scales[:, group], zeros[:, group] = scale, zero
        values[:, groups == group] = (part / scale[:, None] + zero[:, None]).round().clamp(0, most)
    return values, scales, zeros, groups


def gptq(bits: int, *, symmetric: bool = True, offset: int = 1, desc_act: bool = False) -> Callable[..., Stored]:
    def store(weight: torch.Tensor) -> Stored:
        generator = torch.Generator().manual_seed(weight.shape[1])
        order = torch.randperm(weight.shape[1], generator=generator) if desc_act else None
        values, scales, zeros, groups = integers(weight, bits, symmetric=symmetric, order=order)
        tensors = {
            "qweight": pack(values, bits).T.contiguous(),
            "qzeros": pack(zeros.T - offset, bits),
            "scales": scales.T.half().contiguous(),
            "g_idx": groups.int(),
        }
        return tensors, (values - zeros[:, groups]) * scales[:, groups]

    return store


def awq(weight: torch.Tensor) -> Stored:
    values, scales, zeros, groups = integers(weight, 4, symmetric=False)

    def packed(numbers: torch.Tensor) -> torch.Tensor:  # [outputs, rows]
        return pack(numbers.T.reshape(numbers.shape[1], -1, 8)[..., AWQ_PLACES].flatten(1), 4)

    tensors = {"qweight": packed(values), "qzeros": packed(zeros), "scales": scales.T.half().contiguous()}
    return tensors, (values - zeros[:, groups]) * scales[:, groups]


def packed_int4(weight: torch.Tensor) -> Stored:
    values, scales, zeros, groups = integers(weight, 4, symmetric=True)
    shape = torch.tensor(weight.shape)
    tensors = {"weight_packed": pack(values, 4), "weight_scale": scales.half(), "weight_shape": shape}
    return tensors, (values - zeros[:, groups]) * scales[:, groups]


def int8(weight: torch.Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round()
    return {"weight": values.to(torch.int8), "weight_scale": scale}, values * scale


def fp8(scale_name: str, block: tuple[int, int] | None) -> Callable[..., Stored]:
    def store(weight: torch.Tensor) -> Stored:
        if block is None:
            scale = wide = weight.abs().amax(1, keepdim=True) / 448
        else:
            rows, columns = (-(-size // part) for size, part in zip(weight.shape, block, strict=True))
            scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) / 100 + 0.01
            wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            wide = wide[: weight.shape[0], : weight.shape[1]]
        values = (weight / wide).to(torch.float8_e4m3fn)
        return {"weight": values, scale_name: scale}, values.float() * wide

    return store


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
KINDS = {
    "gptq": Kind(_GPTQ, gptq(4)),
    "gptq, 8 bits": Kind(_GPTQ | {"bits": 8}, gptq(8)),
    "gptq, second version": Kind(_GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, offset=0)),
    "gptq, asymmetric": Kind(
        _GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, symmetric=False, offset=0)
    ),
    "gptq, desc_act": Kind(_GPTQ | {"desc_act": True}, gptq(4, desc_act=True)),
    "awq": Kind({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "fp8 in blocks": Kind(
        {"quant_method": "fp8", "weight_block_size": [48, 64], "activation_scheme": "dynamic"},
        fp8("weight_scale_inv", (48, 64)),
    ),
    "compressed fp8": Kind(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8("weight_scale", None)
    ),
    "compressed int8": Kind(_compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8),
    "compressed int4": Kind(
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP), packed_int4
    ),
}


def save_quantized(source: Path, folder: Path, kind: Kind, *, kept: str = "") -> tuple[Path, Path]:
    """Writes the checkpoint of `source` with quantized projections, and one with the weights that it stands for.

    Projections whose names contain `kept` stay as they are, if it is not empty. Returns the two folders.
    """
    quantized, plain = folder / "quantized", folder / "plain"
    tensors = load_file(source / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight") and not (kept and kept in name):
            parts, tensors[name] = kind.store(tensor.float())
            packed |= {f"{name.removesuffix('.weight')}.{end}": part for end, part in parts.items()}
        else:
            packed[name] = tensor
    for made, contents in ((quantized, packed), (plain, tensors)):
        shutil.copytree(source, made, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({name: tensor.contiguous() for name, tensor in contents.items()}, made / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = dict(kind.config)
    (quantized / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return quantized, plain
