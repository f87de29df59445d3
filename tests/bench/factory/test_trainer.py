"""The training loop learns, and an interruption leaves no trace in the weights."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.factory.batches import StreamWindows, evaluation_batches
from bench.factory.distill import distillation_loss
from bench.factory.models import ModelShape, build_model
from bench.factory.runtime import Runtime
from bench.factory.trainer import LossFunction, Schedule, Trainer, next_token_loss
from services.training.recipe import Recipe

RECIPE = Recipe(steps=40, batch_size=8, sequence_length=16, learning_rate=1e-2, seed=3)


def _trainer(
    directory: Path,
    shape: ModelShape,
    stream: Tensor,
    runtime: Runtime,
    loss: LossFunction = next_token_loss,
    recipe: Recipe = RECIPE,
) -> Trainer:
    directory.mkdir(exist_ok=True)
    return Trainer(
        "tiny",
        build_model(shape, recipe.seed),
        loss,
        StreamWindows(stream, recipe.batch_size, recipe.sequence_length, recipe.seed),
        evaluation_batches(stream, 8, recipe.sequence_length, 512),
        recipe,
        Schedule(steps_between_evaluations=10),
        runtime,
        directory,
        directory / "log.jsonl",
    )


def test_training_lowers_the_loss(tmp_path: Path, tiny_shape: ModelShape, stream: Tensor, runtime: Runtime) -> None:
    trainer = _trainer(tmp_path, tiny_shape, stream, runtime)
    before = trainer.evaluate()
    outcome = trainer.train()
    assert outcome.held_out_loss < 0.7 * before
    assert outcome.tokens == RECIPE.steps * RECIPE.tokens_per_step
    assert (tmp_path / "log.jsonl").read_text().count("\n") >= 4


def test_an_interrupted_training_ends_with_the_same_bits(
    tmp_path: Path, tiny_shape: ModelShape, stream: Tensor, runtime: Runtime
) -> None:
    whole = _trainer(tmp_path / "whole", tiny_shape, stream, runtime)
    whole.train()
    _trainer(tmp_path / "parts", tiny_shape, stream, runtime).train(last_step=17)
    resumed = _trainer(tmp_path / "parts", tiny_shape, stream, runtime)
    resumed.resume()
    resumed.train()
    expected = whole.model.state_dict()
    actual = resumed.model.state_dict()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_resuming_with_other_settings_is_refused(
    tmp_path: Path, tiny_shape: ModelShape, stream: Tensor, runtime: Runtime
) -> None:
    _trainer(tmp_path, tiny_shape, stream, runtime).train(last_step=1)
    other = dataclasses.replace(RECIPE, learning_rate=1.0)
    with pytest.raises(ValueError, match="other settings"):
        _trainer(tmp_path, tiny_shape, stream, runtime, recipe=other).resume()


def test_distillation_brings_the_draft_closer_to_the_target(
    tmp_path: Path, tiny_shape: ModelShape, stream: Tensor, runtime: Runtime
) -> None:
    trainer = _trainer(tmp_path, tiny_shape, stream, runtime)
    trainer.train()
    target = trainer.model.train(False)
    draft_shape = dataclasses.replace(tiny_shape, num_hidden_layers=1)
    distiller = _trainer(tmp_path / "draft", draft_shape, stream, runtime, distillation_loss(target))
    before = distiller.evaluate()
    assert distiller.train().held_out_loss < 0.5 * before


def test_a_model_has_no_divergence_from_itself(tiny_shape: ModelShape, stream: Tensor) -> None:
    model = build_model(tiny_shape, 0).train(False)
    windows = stream[:34].long().view(2, 17)
    assert distillation_loss(model)(model, windows).item() == pytest.approx(0, abs=1e-6)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    recipe = dataclasses.replace(RECIPE, steps=1000, learning_rate=1.0)
    rates = [recipe.learning_rate_at(step) for step in range(1000)]
    assert rates[0] == pytest.approx(1 / 30)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1, abs=1e-4)
