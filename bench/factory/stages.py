"""The stages of a training.

Each stage reads the files of earlier ones in the workspace. It writes its last file after all its other files, so this
file marks the stage as done.
"""

import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bench.factory import corpus, dialogues, sources
from bench.factory.batches import evaluation_batches
from bench.factory.context import Context, corpus_windows, fit, mixed_batches
from bench.factory.distill import distillation_loss
from bench.factory.eagle_stages import adopt_target, evaluate_head, export_head, train_head
from bench.factory.evaluate import held_out_loss, measure_acceptance
from bench.factory.export import export_model
from bench.factory.models import MAX_MODEL_LENGTH, build_model, load_model, save_model
from bench.factory.samples import sample_rows
from bench.factory.streams import write_streams
from bench.factory.tokenizer import save_tokenizer, train_tokenizer
from bench.factory.tokens import sample_texts
from bench.factory.trainer import next_token_loss
from bench.factory.workspace import (
    Workspace,
    read_documents,
    read_json,
    write_array,
    write_documents,
    write_json,
)
from services.training.recipe import Recipe
from services.training.traffic import TEMPERATURES

_MEGABYTE = 1_000_000
# The share of steps in which the draft learns the language from the corpus alone; then samples are mixed in.
_CORPUS_ONLY_FRACTION = 0.2
_EVALUATION_BATCH_SIZE = 16


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
            "train": corpus.size_of(collected.train),
            "held_out": corpus.size_of(collected.held_out),
            "dialogues": corpus.size_of(chats),
            "packages": [asdict(c.package) | _counts(c) for c in contributions],
        },
    )


def make_tokenizer(context: Context) -> None:
    options, workspace = context.options, context.workspace
    sample = sample_texts(read_documents(workspace.documents("train")), round(options.tokenizer_sample_mb * _MEGABYTE))
    vocabulary_size = context.target_shape.vocab_size
    save_tokenizer(train_tokenizer(sample, MAX_MODEL_LENGTH, vocabulary_size), workspace.tokenizer)
    write_streams(workspace)


def train_target(context: Context) -> None:
    options = context.options
    recipe = Recipe(
        steps=options.target_tokens // options.tokens_per_step,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        learning_rate=options.target_learning_rate,
        seed=options.seed,
    )
    model = build_model(context.target_shape, recipe.seed)
    fit(context, "target", model, next_token_loss, recipe, corpus_windows(context, recipe), save_model)


def make_samples(context: Context) -> None:
    options, workspace = context.options, context.workspace
    target = load_model(workspace.model("target"), context.runtime.device, context.runtime.inference_dtype)
    rows = sample_rows(
        target,
        context.stream("train"),
        num_rows=options.num_samples,
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
    batches = mixed_batches(context, recipe, first_mixed_step=round(recipe.steps * _CORPUS_ONLY_FRACTION))
    target = load_model(workspace.model("target"), context.runtime.device, context.runtime.inference_dtype)
    model = build_model(context.draft_shape, recipe.seed)
    fit(context, "draft", model, distillation_loss(target), recipe, batches, save_model)


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
    "adopt": adopt_target,
    "target": train_target,
    "samples": make_samples,
    "draft": train_draft,
    "evaluate": evaluate_pair,
    "export": export_pair,
    "eagle": train_head,
    "evaluate-eagle": evaluate_head,
    "export-eagle": export_head,
}


def run(context: Context) -> None:
    """Run the chosen stages in their order; when resuming, only those that aren't done.

    Raises ValueError if a stage needs files of an earlier one that has not run.
    """
    context.runtime.prepare()
    for name, stage in _STAGES.items():
        if name not in context.options.chosen_stages:
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
        "adopt": workspace.token_facts,
        "target": workspace.training_facts("target"),
        "samples": workspace.samples,
        "draft": workspace.training_facts("draft"),
        "evaluate": workspace.evaluation,
        "export": workspace.export("draft") / "README.md",
        "eagle": workspace.training_facts("eagle"),
        "evaluate-eagle": workspace.head_evaluation,
        "export-eagle": workspace.export("eagle") / "README.md",
    }[stage]


def _counts(contribution: corpus.Contribution) -> dict[str, int]:
    return {"files": contribution.num_files, "bytes": contribution.num_bytes}
