"""The context of all stages, and their shared steps: training a model, making its batches."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.factory.batches import (
    BatchSource,
    MixedBatches,
    SampledRows,
    StreamWindows,
    evaluation_batches,
    to_device,
)
from bench.factory.models import DRAFT_SHAPE, TARGET_SHAPE, ModelShape
from bench.factory.options import TrainingOptions
from bench.factory.runtime import Runtime
from bench.factory.trainer import LossFunction, ModelT, Schedule, Trainer
from bench.factory.workspace import Workspace, read_array, write_json
from services.training.models import count_parameters
from services.training.recipe import Recipe


@dataclass(frozen=True)
class Context:
    options: TrainingOptions
    workspace: Workspace
    runtime: Runtime
    target_shape: ModelShape = TARGET_SHAPE
    draft_shape: ModelShape = DRAFT_SHAPE

    def stream(self, split: str) -> Tensor:
        """Load one token stream onto the device."""
        return to_device(read_array(self.workspace.stream(split)), self.runtime.device)


def fit(
    context: Context,
    name: str,
    model: ModelT,
    loss_function: LossFunction[ModelT],
    recipe: Recipe,
    batches: BatchSource,
    save: Callable[[ModelT, Path], None],
) -> None:
    """Train the model called ``name``, save it, and record its recipe and outcome."""
    options, workspace = context.options, context.workspace
    trainer = Trainer(
        name,
        model,
        loss_function,
        batches,
        evaluation_batches(
            context.stream("held_out"),
            recipe.batch_size,
            recipe.sequence_length,
            options.evaluation_tokens,
        ),
        recipe,
        Schedule(options.evaluate_every, options.checkpoint_minutes),
        context.runtime,
        workspace.training(name),
        workspace.log,
    )
    if options.resume:
        trainer.resume()
    outcome = trainer.train()
    save(model, workspace.model(name))
    write_json(
        workspace.training_facts(name),
        {
            "parameters": count_parameters(model),
            "recipe": asdict(recipe),
            "outcome": asdict(outcome),
            "device": context.runtime.device_name,
            "torch": torch.__version__,
        },
    )


def corpus_windows(context: Context, recipe: Recipe) -> StreamWindows:
    return StreamWindows(context.stream("train"), recipe.batch_size, recipe.sequence_length, recipe.seed)


def mixed_batches(context: Context, recipe: Recipe, first_mixed_step: int) -> BatchSource:
    """Return windows of the corpus, mixed with the target's samples from ``first_mixed_step`` on."""
    windows, fraction = corpus_windows(context, recipe), context.options.on_policy_fraction
    if fraction == 0:
        return windows
    rows = to_device(read_array(context.workspace.samples), context.runtime.device)
    samples = SampledRows(rows, recipe.tokens_per_step, recipe.seed)
    return MixedBatches(windows, samples, fraction, first_mixed_step, recipe.seed)
