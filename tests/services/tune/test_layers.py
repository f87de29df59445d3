from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.models import Widening, widen_model
from cluster.config.file import load_config
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from services.tune.layers import num_trials, search_layers

TEXT = "def read(self, size=-1):\n    data = self._buffer[:size]\n    return data\n" * 4


def test_layers_that_do_nothing_are_left_out(tmp_path: Path) -> None:
    source = resolve_model_folder("outrider-target-12m")
    config = ModelConfig.from_folder(source)
    widen_model(source, tmp_path, Widening(config, 1, 1152))
    tensors = load_file(tmp_path / "model.safetensors")
    for index in (1, 4):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{index}.{name}.weight"].zero_()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    trials: list[int] = []
    settings = [f"target.model={tmp_path}", "target.dtype=float32"]
    kept = search_layers(load_config(None, settings), [TEXT], Tokenizer(source), lambda: trials.append(1))
    assert set(kept) <= {0, 2, 3, 5}
    assert kept
    assert len(trials) == num_trials(config.num_layers) == 20


def test_of_a_model_that_needs_all_its_layers_none_are(tmp_path: Path) -> None:
    """With random weights every layer decides the next token."""
    source = resolve_model_folder("outrider-target-12m")
    widen_model(source, tmp_path, Widening(ModelConfig.from_folder(source), 1, 1152))
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "layers" in name:
            tensors[name] = (0.2 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    settings = [f"target.model={tmp_path}", "target.dtype=float32"]
    assert search_layers(load_config(None, settings), [TEXT], Tokenizer(source)) == ()
