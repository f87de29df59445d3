"""The engine's Triton kernels, in Triton's interpreter, and who asks for them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.engine.loader import form_on
from cluster.engine.model import TorchModel
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder
from tests.interpreter import programs, run_interpreted

pytest.importorskip("triton")


@pytest.mark.parametrize("path", programs(__file__), ids=lambda path: path.stem)
def test_in_the_interpreter(path: Path) -> None:
    run_interpreted(path)


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig.from_folder(resolve_model_folder("outrider-target-12m"))


def test_a_gpu_computes_with_them_if_triton_is_installed(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.engine.triton_model import InvariantTritonModel, TritonModel

    gpu = torch.device("cuda")
    assert form_on(config, torch.bfloat16, gpu) is TritonModel
    assert form_on(config, torch.bfloat16, gpu, "invariant") is InvariantTritonModel
    assert form_on(config, torch.bfloat16, torch.device("cpu")) is not TritonModel
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert form_on(config, torch.bfloat16, gpu) is TorchModel


@pytest.mark.parametrize(("num_heads", "form"), [(64, "TritonModel"), (66, "TorchModel")])
def test_a_model_with_more_query_heads_than_a_tile_has_rows_is_left_to_pytorch(
    config: ModelConfig, num_heads: int, form: str
) -> None:
    large = replace(config, num_heads=num_heads, num_kv_heads=2)
    assert form_on(large, torch.bfloat16, torch.device("cuda")).__name__ == form
