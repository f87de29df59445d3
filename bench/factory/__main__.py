"""Trains the bundled pair, or an EAGLE-3 head for a trained target: `python -m bench.factory`."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from bench.factory.options import STAGES, TrainingOptions
from services.argument_types import seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; their defaults are those of TrainingOptions."""
    run = parser.add_argument_group("run")
    run.add_argument(
        "what",
        nargs="?",
        choices=tuple(STAGES),
        help="pair: target, draft and their tokenizer (the default); eagle: an EAGLE-3 head for a trained "
        "target (draft.drafter eagle; vLLM's method eagle3)",
    )
    run.add_argument("--out", type=Path, required=True, help="folder for all outputs")
    run.add_argument(
        "--stages",
        type=lambda text: tuple(text.split(",")),
        help="comma-separated; all of them, in their order: "
        + "; ".join(f"{what}: {','.join(stages)}" for what, stages in STAGES.items()),
    )
    run.add_argument("--resume", action="store_true", help="skip finished stages, continue others")
    run.add_argument("--seed", type=seed, help="seed of initial weights, batches and samples")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"))
    run.add_argument("--compile", action=argparse.BooleanOptionalAction, help="use torch.compile")
    run.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="choose kernels that give the same bits every time (default: yes)",
    )
    run.add_argument("--target", help="target of an EAGLE head: a Llama's folder or bundled name")
    text = parser.add_argument_group("text")
    text.add_argument("--site-packages", action="store_true", help="also train on all installed packages")
    text.add_argument("--package-limit-mb", type=float, help="maximum text of one top-level package")
    text.add_argument("--dialogues-mb", type=float, help="maximum chat text made from docstrings")
    text.add_argument("--tokenizer-sample-mb", type=float, help="text to train the tokenizer on")
    training = parser.add_argument_group("training")
    training.add_argument("--target-tokens", type=int, help="tokens to train the target on")
    training.add_argument("--draft-tokens", type=int, help="tokens to distill the draft on")
    training.add_argument("--eagle-tokens", type=int, help="tokens to train an eagle head on")
    training.add_argument(
        "--eagle-vocabulary", type=int, help="tokens that an eagle head can draft, at most half of all"
    )
    training.add_argument("--batch-size", type=int, help="windows per step")
    training.add_argument("--eagle-batch-size", type=int, help="windows per step of an eagle head")
    training.add_argument("--sequence-length", type=int, help="tokens per window")
    training.add_argument("--lr", dest="target_learning_rate", type=float, help="learning rate of the target")
    training.add_argument("--draft-lr", dest="draft_learning_rate", type=float, help="learning rate of the draft")
    training.add_argument("--eagle-lr", dest="eagle_learning_rate", type=float, help="learning rate of an EAGLE head")
    training.add_argument("--checkpoint-minutes", type=float, help="time between checkpoints")
    samples = parser.add_argument_group("samples of the target")
    samples.add_argument("--samples", type=int, help="rows of text to sample from the target")
    samples.add_argument("--eagle-samples", type=int, help="the same for an EAGLE head")
    samples.add_argument("--sample-batch-size", type=int, help="rows sampled at once")
    samples.add_argument("--on-policy-fraction", type=float, help="share of the draft's later steps on samples")
    evaluation = parser.add_argument_group("evaluation")
    evaluation.add_argument("--evaluate-every", type=int, help="steps between evaluations")
    evaluation.add_argument("--evaluation-tokens", type=int, help="held-out tokens to evaluate on")
    evaluation.add_argument("--acceptance-prompts", type=int, help="held-out prompts to continue")


def main(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    # Imported here so that showing the options doesn't wait for torch.
    from bench.factory.context import Context
    from bench.factory.runtime import Runtime, choose_device
    from bench.factory.stages import run
    from bench.factory.workspace import Workspace

    try:
        options = _options(args)
        runtime = Runtime(choose_device(options.device), options.compile, options.deterministic)
        options.out.mkdir(parents=True, exist_ok=True)
        run(Context(options, Workspace(options.out), runtime))
    except ValueError as error:
        print(f"python -m bench.factory: {error}", file=sys.stderr)
        return 2
    return 0


def _options(args: argparse.Namespace) -> TrainingOptions:
    given = {field.name: getattr(args, field.name) for field in fields(TrainingOptions)}
    return TrainingOptions(**{name: value for name, value in given.items() if value is not None})


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python -m bench.factory")
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
