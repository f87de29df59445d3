"""Quantized checkpoints give the same logits as their dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.engine.batch import Segment
from cluster.engine.checkpoint import TensorReader
from cluster.engine.loader import load_model
from cluster.engine.memory_plan import PlannedModel
from cluster.engine.model import TorchModel
from cluster.engine.model_config import ModelConfig
from cluster.engine.quantization import QuantizedWeight
from cluster.engine.runner import ModelRunner
from cluster.engine.stored_weights import read_stored, stack_outputs, to_floats
from cluster.errors import ConfigurationError

from .quantized_checkpoints import KINDS, save_quantized

CPU = torch.device("cpu")
LOADED_BITS = {"gptq": 4, "gptq, 8 bits": 8, "gptq, second version": 4, "gptq, asymmetric": 8, "awq": 8}
LOADED_BITS |= {"compressed int8": 8, "compressed int4": 4}  # the others become floating point


@pytest.fixture(scope="module")
def folders(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The quantized checkpoint and the plain one of each kind."""
    source = tiny_folder(family="qwen2")
    return {name: save_quantized(source, tmp_path_factory.mktemp("stored"), kind) for name, kind in KINDS.items()}


def logits(folder: Path, form: type[TorchModel] | None = None) -> torch.Tensor:
    loaded = load_model(folder, torch.float32, CPU, form=form)
    return ModelRunner(loaded, 4, 16).run([Segment(list(range(40)), 0, list(range(10)), num_logits=40)])


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_those_that_the_integers_stand_for(name: str, folders: dict[str, tuple[Path, Path]]) -> None:
    quantized, plain = folders[name]
    stored = ModelConfig.from_folder(quantized).stored_format
    assert stored is not None
    readers = [TensorReader(folder, torch.float32, CPU) for folder in (quantized, plain)]
    config = ModelConfig.from_folder(plain)
    for end, num_outputs, num_inputs in (
        ("self_attn.q_proj", config.q_size, config.hidden_size),
        ("mlp.down_proj", config.hidden_size, config.intermediate_size),
    ):
        projection = f"model.layers.1.{end}"
        weight = read_stored(stored, readers[0], projection, num_outputs, num_inputs)
        expected = readers[1].read([(f"{projection}.weight", num_outputs)], num_inputs)
        assert torch.allclose(to_floats(weight), expected, rtol=1e-6, atol=0)
        assert (weight.bits if isinstance(weight, QuantizedWeight) else None) == LOADED_BITS.get(name)


@pytest.mark.parametrize("name", KINDS)
def test_models_compute_the_same(name: str, folders: dict[str, tuple[Path, Path]]) -> None:
    quantized, plain = folders[name]
    expected = logits(plain)
    assert (logits(quantized) - expected).abs().max() < 1e-3 * expected.abs().max()
    assert (logits(quantized, TorchModel) - expected).abs().max() < 1e-3 * expected.abs().max()


def test_projections_that_are_not_quantized_are_read_as_they_are(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Their layers have quantized and plain projections side by side."""
    quantized, plain = save_quantized(tiny_folder(), tmp_path, KINDS["gptq"], kept="v_proj")
    expected = logits(plain)
    assert (logits(quantized) - expected).abs().max() < 1e-3 * expected.abs().max()


def test_integers_of_different_groups_are_stacked_in_floating_point() -> None:
    weights = [
        QuantizedWeight(torch.ones(2, 64, dtype=torch.int8), torch.ones(2, groups), 4, torch.float32)
        for groups in (1, 2)
    ]
    assert isinstance(stack_outputs(weights[:1] * 2), QuantizedWeight)
    mixed = stack_outputs(weights)
    assert isinstance(mixed, torch.Tensor)
    assert torch.equal(mixed, torch.ones(4, 64))


def test_a_plan_counts_the_bits_in_memory(folders: dict[str, tuple[Path, Path]]) -> None:
    dtypes = {name: PlannedModel.parse(str(folders[name][0])).dtype for name in ("gptq", "awq", "fp8 in blocks")}
    assert dtypes == {"gptq": "int4", "awq": "int8", "fp8 in blocks": "fp16"}
    assert PlannedModel.parse(f"{folders['gptq'][0]}:bf16").dtype == "bf16"


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    """Applies `change` to the tensors and the quantization_config of `folder`."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    change(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


DOWN = "model.layers.0.mlp.down_proj"
DAMAGES: dict[str, tuple[str, Callable[[dict[str, torch.Tensor], dict[str, Any]], Any], str]] = {
    "scales are missing": (
        "compressed int8",
        lambda tensors, config: tensors.pop(f"{DOWN}.weight_scale"),
        r"down_proj.weight is int8, expected bfloat16.*scales may be missing",
    ),
    "scales of FP8 have another name": (
        "fp8 in blocks",
        lambda tensors, config: config.pop("weight_block_size"),
        r"proj.weight is float8_e4m3fn, expected bfloat16",
    ),
    "scales of another length": (
        "compressed int8",
        lambda tensors, config: tensors.update({f"{DOWN}.weight_scale": torch.ones(3, 1)}),
        "down_proj.weight_scale has 3 scales",
    ),
    "words in floating point": (
        "gptq",
        lambda tensors, config: tensors.update({f"{DOWN}.qweight": tensors[f"{DOWN}.qweight"].float()}),
        "down_proj.qweight is float32, expected int32",
    ),
    "groups out of range": (
        "gptq, desc_act",
        lambda tensors, config: tensors[f"{DOWN}.g_idx"].sub_(1),
        "down_proj.g_idx names groups outside of 0 to",
    ),
    "groups that do not divide": ("gptq", lambda tensors, config: config.update(group_size=48), "groups of 48"),
    "no bits": ("gptq", lambda tensors, config: config.pop("bits"), "quantization_config lacks a value.*bits"),
    "bits as a string": ("gptq", lambda tensors, config: config.update(bits="4"), "'4' is not a whole number"),
    "group size 0": ("awq", lambda tensors, config: config.update(group_size=0), "0 is not a whole number above 0"),
    "no version": ("awq", lambda tensors, config: config.update(version=None), "quantization_config lacks a value"),
    "half a block": (
        "fp8 in blocks",
        lambda tensors, config: config.update(weight_block_size=[128]),
        "quantization_config lacks a value or has a wrong one",
    ),
    "groups of compressed-tensors as text": (
        "compressed int8",
        lambda tensors, config: config.update(config_groups="all"),
        "quantization_config lacks a value or has a wrong one",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(damage: str, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    kind, change, message = DAMAGES[damage]
    quantized, _ = save_quantized(tiny_folder(), tmp_path, KINDS[kind])
    changed(quantized, change)
    with pytest.raises(ConfigurationError, match=message):
        load_model(quantized, torch.float32, CPU)
