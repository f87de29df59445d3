"""The command `outrider distill`."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from cluster.config import Config
from cluster.config.file import load_config
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from services import drafts
from services.argument_types import above_zero, seed
from services.distill.card import Distilled, by_position, model_card

if TYPE_CHECKING:
    from services.training.traffic import RecordedAnswer

logger = logging.getLogger(__name__)

_HELD_OUT_ONE_IN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains a draft or a head on its target's answers to your prompts. The target answers the prompts on this "
        "machine, and the draft or head learns to choose the same tokens. One prompt in ten is held out; acceptance on "
        "these is reported before and after the training. Needs the extra `train`."
    )
    parser.epilog = (
        "example: outrider distill --traffic traffic.jsonl --target outrider-target-12m --draft outrider-draft-2m "
        "--out my-draft"
    )
    parser.add_argument(
        "--traffic",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines with prompt_token_ids, as in `router.traffic_log_file`, prompt, or messages",
    )
    parser.add_argument(
        "--target", required=True, metavar="MODEL", help="Hugging Face folder, hub name or bundled model"
    )
    parser.add_argument(
        "--drafter",
        choices=("model", "parallel", "eagle", "medusa"),
        default="model",
        help="what to train, as in `draft.drafter`; model: a draft; parallel: one that drafts all tokens of a proposal "
        "in one step (PARD); eagle: an EAGLE-3 head; medusa: Medusa heads (deprecated); default model",
    )
    parser.add_argument(
        "--draft",
        metavar="MODEL",
        help="draft or head to start from: Hugging Face folder, hub name or bundled model (default: a new one)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder for the result and a report")
    parser.add_argument(
        "--set",
        dest="answering",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="setting of the cluster that answers, such as target.dtype=float32",
    )
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--max-tokens", type=above_zero(int), default=128, metavar="N", help="maximum tokens of an answer; default 128"
    )
    answers.add_argument(
        "--streams", type=above_zero(int), default=32, metavar="N", help="concurrent answers; default 32"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=above_zero(float), default=3.0, metavar="N", help="default 3")
    training.add_argument(
        "--batch-size", type=above_zero(int), default=16, metavar="N", help="answers per step; default 16"
    )
    training.add_argument(
        "--learning-rate", type=above_zero(float), metavar="R", help="default 1e-3, or 3e-4 with --draft"
    )
    training.add_argument("--seed", type=seed, default=0, metavar="N")
    shape = parser.add_argument_group("shape of a new draft")
    shape.add_argument("--hidden-size", type=above_zero(int), default=128, metavar="N", help="default 128")
    shape.add_argument("--num-layers", type=above_zero(int), default=3, metavar="N", help="default 3")
    shape.add_argument(
        "--intermediate-size",
        type=above_zero(int),
        metavar="N",
        help="default 512, or the target's for an EAGLE head, which always has the target's other sizes",
    )
    loading = parser.add_argument_group("running cluster")
    loading.add_argument(
        "--load",
        action="store_true",
        help="load the draft on the draft workers of the cluster at --url, as `outrider drafts load` does; --out is a "
        "folder below their `draft.load_root`, with the same path on each worker",
    )
    drafts.add_share_argument(loading)
    drafts.add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError."""
    try:
        import transformers  # noqa: F401  # of the extra
    except ImportError as error:
        raise ConfigurationError("outrider distill needs transformers: pip install 'outrider[train]'") from error
    on_workers = argparse.Namespace(**vars(arguments), folder=str(arguments.out.resolve()))
    if arguments.share != 1.0 and not arguments.load:
        raise ConfigurationError(f"--share {arguments.share:g} needs --load")
    if arguments.load:
        if arguments.drafter not in ("model", "parallel"):
            raise ConfigurationError(f"--load: a target loads its {arguments.drafter} head when it starts")
        on_workers.action = "list"  # before the training, which takes long: there are workers to load it on
        drafts.run(on_workers)
    try:
        _train(arguments)
    except (ValueError, OSError, FloatingPointError) as error:
        raise ConfigurationError(str(error)) from error
    if not arguments.load:
        return 0
    on_workers.action = "load"
    return drafts.run(on_workers)


def _train(arguments: argparse.Namespace) -> None:
    from services.distill.drafter_training import TrainingTask, make_training
    from services.training.recipe import Recipe
    from services.training.traffic import is_held_out

    if arguments.drafter == "medusa":
        logger.warning("--drafter medusa is deprecated: train an EAGLE-3 head, whose drafts see each other")
    model = f"target.model={arguments.target}"
    settings = ["router.port=0", "logging.level=warning", model, "speculation.num_speculative_tokens=0"]
    config = load_config(None, [*settings, *arguments.answering], os.environ)
    folder = resolve_model_folder(arguments.target)
    draft_folder = None if arguments.draft is None else resolve_model_folder(arguments.draft)
    if arguments.out.resolve() == folder.resolve():
        raise ConfigurationError(f"--out {arguments.out} is the folder of the target, which would be overwritten")
    is_draft = arguments.drafter in ("model", "parallel")
    if (
        is_draft
        and draft_folder is not None
        and Tokenizer(draft_folder).fingerprint() != Tokenizer(folder).fingerprint()
    ):
        raise ConfigurationError(f"--draft {arguments.draft} and {arguments.target} have different tokenizers")
    arguments.out.mkdir(parents=True, exist_ok=True)
    answers = _answers(arguments, config, folder)
    held_out = [one for one in answers if is_held_out(one.prompt_token_ids, _HELD_OUT_ONE_IN)]
    taught = [one for one in answers if not is_held_out(one.prompt_token_ids, _HELD_OUT_ONE_IN)]
    if not held_out or not taught:
        raise ConfigurationError(f"{len(answers)} answers are too few: one prompt in {_HELD_OUT_ONE_IN} is held out")
    with _progress("the target reads", len(answers) if is_draft else 0) as progress:
        task = TrainingTask(arguments, config.target, folder, draft_folder, taught, held_out)
        training = make_training(task, progress.update)
    with _progress("acceptance before", len(held_out)) as progress:
        before = training.measure(progress.update)
    recipe = Recipe(
        steps=max(1, round(arguments.epochs * len(taught) / arguments.batch_size)),
        batch_size=arguments.batch_size,
        sequence_length=arguments.max_tokens,
        learning_rate=arguments.learning_rate or (1e-3 if draft_folder is None else 3e-4),
        seed=arguments.seed,
    )
    with _progress("training", recipe.steps) as progress:

        def did_step(loss: float) -> None:
            progress.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            progress.update()

        training.train(recipe, did_step)
    training.save(arguments.out)
    with _progress("acceptance after", len(held_out)) as progress:
        after = training.measure(progress.update)
    result = Distilled(
        arguments.target,
        arguments.draft,
        training.num_parameters(),
        len(taught),
        sum(len(answer.token_ids) for answer in taught),
        len(held_out),
        recipe,
        before,
        after,
        arguments.drafter,
    )
    _report(arguments.out, result)


def _answers(arguments: argparse.Namespace, config: Config, folder: Path) -> list[RecordedAnswer]:
    """Returns the answers, including those of an earlier identical run, because they take longest.

    Omits answers without a token.
    """
    from cluster.engine.fingerprint import weights_fingerprint
    from services.distill.answers import ask
    from services.training.traffic import AnswersFile, is_held_out, read_prompts

    prompts = read_prompts(arguments.traffic, Tokenizer(folder).encode, _renderer(folder))
    longest = ModelConfig.from_folder(folder).resolve_max_model_len(config.target.max_model_len) - arguments.max_tokens
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    if len(fitting) < len(prompts):
        print(
            f"{arguments.traffic}: {len(prompts) - len(fitting)} of {len(prompts)} prompts are left out, which have no "
            f"room for an answer of --max-tokens {arguments.max_tokens}",
            file=sys.stderr,
        )
    prompts = fitting
    num_held_out = sum(is_held_out(prompt, _HELD_OUT_ONE_IN) for prompt in prompts)
    if not 0 < num_held_out < len(prompts):
        raise ConfigurationError(f"{len(prompts)} prompts are too few: one in {_HELD_OUT_ONE_IN} is held out")
    asked = {
        "target": weights_fingerprint(folder),
        "settings": arguments.answering,
        "max_tokens": arguments.max_tokens,
        "prompts": hashlib.sha256(repr(prompts).encode()).hexdigest(),
    }
    file = AnswersFile(arguments.out / "answers.jsonl", asked)
    known = {answer.seed for answer in file.answers}
    if known:
        print(f"{arguments.out}: {len(known)} earlier answers are reused", file=sys.stderr)
    missing = {number: prompt for number, prompt in enumerate(prompts) if number not in known}
    if missing:
        asking = ask(config, missing, max_tokens=arguments.max_tokens, num_streams=arguments.streams)
        with _progress("answers", len(missing)) as progress, contextlib.closing(asking):
            for answer in asking:
                file.add(answer)
                progress.update()
    # In the order of their prompts, not of their arrival: the same answers make the same draft.
    return sorted((answer for answer in file.answers if answer.token_ids), key=lambda answer: answer.seed)


def _renderer(folder: Path) -> Callable[[Any], Sequence[int]]:
    """Returns the token IDs of conversations, written by the model's chat template."""
    from services.router.chat.prompt import ChatPrompts, Conversation
    from services.router.chat.template import ChatTemplate

    prompts = ChatPrompts(ChatTemplate.from_folder(folder), Tokenizer(folder))
    return lambda messages: prompts.encode(Conversation(messages))


def _report(out: Path, result: Distilled) -> None:
    """Prints the result, and writes it to the output folder as report.json and README.md."""
    print(f"{out}: trained on {result.num_taught} answers; acceptance on {result.num_held_out} held-out answers:")
    for old, new in zip(result.before, result.after, strict=True):
        print(
            f"  T = {old.temperature:g}: {old.rate:.3f} -> {new.rate:.3f} ({100 * (new.rate - old.rate):+.1f} points), "
            f"{old.length:.2f} -> {new.length:.2f} tokens a round of 4"
        )
        if result.drafter != "model":
            print(f"    by position in a proposal: {by_position(old)} -> {by_position(new)}")
    (out / "report.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(model_card(out.resolve().name, result), encoding="utf-8")


def _progress(what: str, total: int) -> tqdm[Any]:
    return tqdm(total=total, desc=what, file=sys.stderr, disable=None)
