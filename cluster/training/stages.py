"""The training, stage by stage. Each stage reads what earlier ones left in the workspace.

A stage's last file is written when everything else of it is there, so the file says that it is done.
"""

import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from cluster.training import corpus, dialogues, sources
from cluster.training.batches import (
    BatchSource,
    MixedBatches,
    SampledRows,
    StreamWindows,
    evaluation_batches,
    to_device,
)
from cluster.training.distill import distillation_loss
from cluster.training.evaluate import TEMPERATURES, held_out_loss, measure_acceptance
from cluster.training.export import export_model
from cluster.training.models import (
    DRAFT_SHAPE,
    MAX_MODEL_LENGTH,
    TARGET_SHAPE,
    ModelShape,
    build_model,
    count_parameters,
    load_model,
    save_model,
)
from cluster.training.options import TrainingOptions
from cluster.training.runtime import Runtime
from cluster.training.samples import sample_rows
from cluster.training.tokenizer import save_tokenizer, train_tokenizer
from cluster.training.tokens import encode_documents, sample_texts
from cluster.training.trainer import LossFunction, Recipe, Schedule, Trainer, next_token_loss
from cluster.training.workspace import (
    Workspace,
    read_array,
    read_documents,
    read_json,
    write_array,
    write_documents,
    write_json,
)

_MEGABYTE = 1_000_000
_SPLITS = ("train", "held_out")
# The draft first learns the language from the corpus alone; samples follow for the rest.
_CORPUS_ONLY_FRACTION = 0.2
_EVALUATION_BATCH_SIZE = 16


@dataclass(frozen=True)
class Context:
    """What every stage is given."""

    options: TrainingOptions
    workspace: Workspace
    runtime: Runtime
    target_shape: ModelShape = TARGET_SHAPE
    draft_shape: ModelShape = DRAFT_SHAPE

    def stream(self, split: str) -> Tensor:
        """Load one token stream onto the device."""
        return to_device(read_array(self.workspace.stream(split)), self.runtime.device)


def collect_corpus(context: Context) -> None:
    options, workspace = context.options, context.workspace
    roots = [sources.standard_library()]
    if options.site_packages:
        roots += sources.installed_packages()
    collected = corpus.collect(roots, round(options.package_limit_mb * _MEGABYTE))
    chats = dialogues.dialogues(collected.train, round(options.dialogues_mb * _MEGABYTE))
    write_documents(workspace.documents("train"), collected.train + chats)
    write_documents(workspace.documents("held_out"), collected.held_out)
    contributions = sorted(collected.contributions.values(), key=lambda c: -c.num_bytes)
    write_json(
        workspace.corpus_facts,
        {
            "python": platform.python_version(),
            "train": _size(collected.train),
            "held_out": _size(collected.held_out),
            "dialogues": _size(chats),
            "packages": [asdict(c.package) | _counts(c) for c in contributions],
        },
    )


def make_tokenizer(context: Context) -> None:
    options, workspace = context.options, context.workspace
    documents = {split: read_documents(workspace.documents(split)) for split in _SPLITS}
    sample = sample_texts(documents["train"], round(options.tokenizer_sample_mb * _MEGABYTE))
    vocabulary_size = context.target_shape.vocab_size
    save_tokenizer(train_tokenizer(sample, MAX_MODEL_LENGTH, vocabulary_size), workspace.tokenizer)
    serialized = (workspace.tokenizer / "tokenizer.json").read_text(encoding="utf-8")
    facts = {}
    for split in _SPLITS:
        stream = encode_documents(serialized, documents[split])
        write_array(workspace.stream(split), stream)
        facts[split] = _size(documents[split]) | {"tokens": len(stream)}
    write_json(workspace.token_facts, facts)


def train_target(context: Context) -> None:
    options = context.options
    recipe = Recipe(
        steps=options.target_tokens // options.tokens_per_step,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        learning_rate=options.target_learning_rate,
        seed=options.seed,
    )
    _train(
        context,
        "target",
        context.target_shape,
        next_token_loss,
        recipe,
        _corpus_windows(context, recipe),
    )


def make_samples(context: Context) -> None:
    options, workspace = context.options, context.workspace
    target = load_model(workspace.model("target"), context.runtime.device, context.runtime.inference_dtype)
    rows = sample_rows(
        target,
        context.stream("train"),
        num_rows=options.samples,
        batch_size=options.sample_batch_size,
        seed=options.seed + 2,
    )
    write_array(workspace.samples, rows)


def train_draft(context: Context) -> None:
    options, workspace = context.options, context.workspace
    recipe = Recipe(
        steps=options.draft_tokens // options.tokens_per_step,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        learning_rate=options.draft_learning_rate,
        seed=options.seed + 1,
    )
    batches: BatchSource = _corpus_windows(context, recipe)
    if options.on_policy_fraction > 0:
        rows = to_device(read_array(workspace.samples), context.runtime.device)
        batches = MixedBatches(
            batches,
            SampledRows(rows, recipe.tokens_per_step, recipe.seed),
            options.on_policy_fraction,
            first_mixed_step=round(recipe.steps * _CORPUS_ONLY_FRACTION),
            seed=recipe.seed,
        )
    target = load_model(workspace.model("target"), context.runtime.device, context.runtime.inference_dtype)
    _train(context, "draft", context.draft_shape, distillation_loss(target), recipe, batches)


def evaluate_pair(context: Context) -> None:
    options, workspace = context.options, context.workspace
    models = {name: load_model(workspace.model(name), context.runtime.device) for name in ("target", "draft")}
    stream = context.stream("held_out")
    batches = evaluation_batches(stream, _EVALUATION_BATCH_SIZE, options.sequence_length, options.evaluation_tokens)
    size = read_json(workspace.token_facts)["held_out"]
    tokens_per_byte = size["tokens"] / size["bytes"]
    losses = {name: asdict(held_out_loss(model, batches, tokens_per_byte)) for name, model in models.items()}
    acceptance = [
        measure_acceptance(
            models["target"],
            models["draft"],
            stream,
            options.acceptance_prompts,
            temperature,
            options.seed + 3,
        )
        for temperature in TEMPERATURES
    ]
    write_json(
        workspace.evaluation,
        {"held_out_loss": losses, "acceptance": [asdict(row) for row in acceptance]},
    )
    print(workspace.evaluation.read_text(encoding="utf-8"), file=sys.stderr)


def export_pair(context: Context) -> None:
    for name in ("target", "draft"):
        export_model(context.workspace, name)


_STAGES: dict[str, Callable[[Context], None]] = {
    "corpus": collect_corpus,
    "tokenizer": make_tokenizer,
    "target": train_target,
    "samples": make_samples,
    "draft": train_draft,
    "evaluate": evaluate_pair,
    "export": export_pair,
}


def run(context: Context) -> None:
    """Run the chosen stages in their order; when resuming, only those that aren't done."""
    context.runtime.prepare()
    for name, stage in _STAGES.items():
        if name not in context.options.stages:
            continue
        last_file = _last_file(context.workspace, name)
        if context.options.resume and last_file.exists():
            print(f"{name}: already done", file=sys.stderr)
            continue
        last_file.unlink(missing_ok=True)
        print(f"{name}: started", file=sys.stderr)
        try:
            stage(context)
        except FileNotFoundError as error:
            raise ValueError(f"stage {name} needs {error.filename}: run earlier stages") from error


def _last_file(workspace: Workspace, stage: str) -> Path:
    return {
        "corpus": workspace.corpus_facts,
        "tokenizer": workspace.token_facts,
        "target": workspace.training_facts("target"),
        "samples": workspace.samples,
        "draft": workspace.training_facts("draft"),
        "evaluate": workspace.evaluation,
        "export": workspace.export("draft") / "README.md",
    }[stage]


def _train(
    context: Context,
    name: str,
    shape: ModelShape,
    loss_function: LossFunction,
    recipe: Recipe,
    batches: BatchSource,
) -> None:
    options, workspace = context.options, context.workspace
    model = build_model(shape, recipe.seed)
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
    save_model(model, workspace.model(name))
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


def _corpus_windows(context: Context, recipe: Recipe) -> StreamWindows:
    return StreamWindows(context.stream("train"), recipe.batch_size, recipe.sequence_length, recipe.seed)


def _size(documents: list[corpus.Document]) -> dict[str, int]:
    num_bytes = sum(len(document.text.encode()) for document in documents)
    return {"documents": len(documents), "bytes": num_bytes}


def _counts(contribution: corpus.Contribution) -> dict[str, int]:
    return {"files": contribution.num_files, "bytes": contribution.num_bytes}
