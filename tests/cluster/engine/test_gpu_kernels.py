"""The engine's Triton kernels, in Triton's interpreter, and who asks for them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from cluster.engine.fixed_shape_model import FixedShapeModel
from cluster.engine.loader import form_on
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from tests.interpreter import programs, run_interpreted

pytest.importorskip("triton")


@pytest.mark.parametrize("path", programs(__file__), ids=lambda path: path.stem)
def test_in_the_interpreter(path: Path) -> None:
    run_interpreted(path)


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig.from_folder(resolve_model_folder("outrider-target-12m"))


def test_they_are_used_where_they_are_asked_for(config: ModelConfig) -> None:
    from cluster.engine.triton_model import TritonModel

    gpu = torch.device("cuda")
    assert form_on(config, torch.bfloat16, gpu, "triton") is TritonModel
    assert form_on(config, torch.bfloat16, gpu, "torch") is FixedShapeModel
    for kernels in ("torch", "triton"):  # on a CPU the setting says nothing
        assert form_on(config, torch.bfloat16, torch.device("cpu"), kernels) not in (TritonModel, FixedShapeModel)


def test_without_triton_it_is_said(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="Triton is not installed"):
        form_on(config, torch.bfloat16, torch.device("cuda"), "triton")


def test_more_heads_than_a_tile_has_are_refused() -> None:
    from cluster.engine.gpu_kernels.paged_attention import constants

    assert constants(64, 2, 128, torch.bfloat16, 16, 0, False)["group"] == 32
    with pytest.raises(ConfigurationError, match="set torch"):
        constants(66, 2, 128, torch.bfloat16, 16, 0, False)
