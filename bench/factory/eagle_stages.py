"""The stages that make an EAGLE head for an existing target."""

import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from bench.factory.card import head_card
from bench.factory.context import Context, fit, mixed_batches
from bench.factory.distill import eagle_loss
from bench.factory.evaluate import measure_head_acceptance
from bench.factory.models import load_model
from bench.factory.streams import write_streams
from bench.factory.tokenizer import load_tokenizer, save_tokenizer
from bench.factory.workspace import write_json
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from services.training.eagle import TrainableEagle, build_head, load_head, save_head
from services.training.heads import TargetEnds
from services.training.recipe import Recipe

# Less than the bundled target's 1152, so that the file stays under 5 MB.
_INTERMEDIATE_SIZE = 640
_MAX_VOCABULARY = 2**16  # token streams are uint16


def adopt_target(context: Context) -> None:
    """Copies a trained target and its tokenizer into the workspace, and encodes the corpus.

    Raises ValueError if there is no such target, or its vocabulary is too large.
    """
    workspace, name = context.workspace, context.options.target
    try:
        folder = resolve_model_folder(name)
    except ConfigurationError as error:
        raise ValueError(str(error)) from error
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) > _MAX_VOCABULARY:
        raise ValueError(f"the tokenizer of {name} has {len(tokenizer)} tokens; the maximum is {_MAX_VOCABULARY}")
    save_tokenizer(tokenizer, workspace.tokenizer)
    target = workspace.model("target")
    target.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(folder / file, target / file)
    write_streams(workspace)


def train_head(context: Context) -> None:
    options, workspace = context.options, context.workspace
    recipe = Recipe(
        steps=options.eagle_tokens // options.eagle_tokens_per_step,
        batch_size=options.eagle_batch_size,
        sequence_length=options.sequence_length,
        learning_rate=options.eagle_learning_rate,
        seed=options.seed + 4,
    )
    target = load_model(workspace.model("target"), context.runtime.device, context.runtime.inference_dtype)
    intermediate_size = min(_INTERMEDIATE_SIZE, target.config.intermediate_size)
    token_ids = _frequent_tokens(context, target.config.vocab_size)
    head = build_head(TargetEnds.of(target), intermediate_size, token_ids, recipe.seed)
    loss = eagle_loss(target, TrainableEagle.num_trained_steps)
    fit(context, "eagle", head, loss, recipe, mixed_batches(context, recipe, first_mixed_step=0), save_head)


def _frequent_tokens(context: Context, vocab_size: int) -> torch.Tensor:
    """Returns the IDs, ascending, of the most frequent tokens of the training text, at most half of the vocabulary."""
    number = min(context.options.eagle_vocabulary, vocab_size // 2)
    counts = torch.bincount(context.stream("train").long().cpu(), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:number].sort().values


def evaluate_head(context: Context) -> None:
    options, workspace = context.options, context.workspace
    device = context.runtime.device
    acceptance = measure_head_acceptance(
        load_model(workspace.model("target"), device),
        load_head(workspace.model("eagle"), ModelConfig.from_folder(workspace.model("target"))).to(device),
        context.stream("held_out"),
        options.acceptance_prompts,
        options.seed + 3,
    )
    write_json(workspace.head_evaluation, asdict(acceptance))


def export_head(context: Context) -> None:
    """Writes the head's folder. It has no tokenizer: vLLM takes the target's."""
    workspace = context.workspace
    directory = workspace.export("eagle")
    directory.mkdir(parents=True, exist_ok=True)
    for file in sorted(workspace.model("eagle").iterdir()):
        shutil.copyfile(file, directory / file.name)
    Path(directory / "README.md").write_text(head_card(workspace), encoding="utf-8")
