"""Widened models and heads compute what the bundled ones do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from bench.models import Widening, widen_model
from cluster.config import Config
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder
from services.training.eagle import build_head, captured_states, load_head, save_head
from services.training.heads import TargetEnds, TrainableHead
from services.training.medusa import build_medusa, load_medusa, save_medusa

SOURCE = resolve_model_folder(Config().target.model)
WIDENING = Widening(ModelConfig.from_folder(SOURCE))
TOKEN_IDS = torch.tensor([[5, 900, 33, 4000, 77, 1, 250, 610]])


def load(folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The bundled target and the widened target."""
    folder = tmp_path_factory.mktemp("target")
    assert 185e6 < widen_model(SOURCE, folder, WIDENING) < 195e6
    return load(SOURCE), load(folder)


@torch.inference_mode()
def test_widening_keeps_the_function(targets: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> None:
    narrow, wide = (target(TOKEN_IDS).logits for target in targets)
    # Zeros add nothing; only the order of the sums may differ.
    assert (narrow - wide).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
@torch.no_grad()
def test_widening_keeps_the_drafts_of_heads(
    kind: str, targets: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path
) -> None:
    narrow, wide = (TargetEnds.of(target) for target in targets)
    torch.manual_seed(0)
    heads: list[TrainableHead]
    if kind == "eagle":
        save_head(build_head(narrow, 640, torch.arange(7, 2055), seed=1), tmp_path / "narrow")
        widen_model(tmp_path / "narrow", tmp_path / "wide", WIDENING)
        heads = [load_head(tmp_path / "narrow", WIDENING.old), load_head(tmp_path / "wide", WIDENING.new)]
    else:
        medusa = build_medusa(narrow, 2)
        for parameter in medusa.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        save_medusa(medusa, tmp_path / "narrow")
        widen_model(tmp_path / "narrow", tmp_path / "wide", WIDENING)
        heads = [load_medusa(tmp_path / "narrow", narrow), load_medusa(tmp_path / "wide", wide)]
    found = []
    for target, head in zip(targets, heads, strict=True):
        output = target.model(TOKEN_IDS, output_hidden_states=True)
        states = output.last_hidden_state if kind == "medusa" else captured_states(head, output.hidden_states)
        steps = head.step_logits(target.model.embed_tokens(TOKEN_IDS), states, 2, slice(None))
        found.append(torch.stack(list(steps)))
    assert found[0].abs().max() > 1
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_further_layers_change_nothing(targets: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path) -> None:
    widen_model(SOURCE, tmp_path, replace(WIDENING, num_layers=8))
    deep = load(tmp_path)
    assert len(deep.model.layers) == 8
    assert torch.equal(deep(TOKEN_IDS).logits, targets[1](TOKEN_IDS).logits)
