"""The widened target is the bundled one, to the bit."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from bench.models import Widening, widen_model
from cluster.config import Config
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder


def test_widening_keeps_the_function(tmp_path: Path) -> None:
    source = resolve_model_folder(Config().target.model)
    num_parameters = widen_model(source, tmp_path / "target", Widening(ModelConfig.from_folder(source)))
    assert 185e6 < num_parameters < 195e6
    token_ids = torch.tensor([[5, 900, 33, 4000, 77, 1, 250, 610]])
    with torch.inference_mode():
        narrow, wide = (
            LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(token_ids).logits
            for folder in (source, tmp_path / "target")
        )
    # Zeros add nothing; only the order of the sums may differ.
    assert (narrow - wide).abs().max() < 1e-4
