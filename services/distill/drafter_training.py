"""The kinds of drafts and heads that `outrider distill` trains."""

from __future__ import annotations

import argparse
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cluster.config.workers import TargetConfig
from cluster.engine.model_config import ModelConfig
from cluster.engine.runner import load_weights
from cluster.errors import ConfigurationError
from services.training.eagle import TrainableEagle, build_head, load_head, save_head
from services.training.heads import TargetEnds, TrainableHead
from services.training.medusa import TrainableMedusa, build_medusa, load_medusa, save_medusa
from services.training.models import count_parameters
from services.training.parallel import add_mask_token, unused_token_id
from services.training.teaching import AnswerReader, Lesson, teach
from services.training.traffic_acceptance import NUM_POSITIONS, TrafficAcceptance, measure_traffic_acceptance
from services.training.traffic_draft import DraftShape, load_draft, new_draft, train_draft
from services.training.traffic_heads import HeadLessons, measure_head, train_head

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from services.training.recipe import Recipe
    from services.training.traffic import RecordedAnswer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_MAX_HEAD_VOCABULARY = 32_000  # tokens of an EAGLE head, as in published ones
_NUM_MEDUSA_HEADS = 5  # as in published heads
_DRAFT_INTERMEDIATE_SIZE = 512

DidOne = Callable[[], object]


@dataclass(frozen=True)
class TrainingTask:
    """The target, the answers, and the options of one training run."""

    arguments: argparse.Namespace
    target: TargetConfig
    target_folder: Path
    draft_folder: Path | None  # draft or head that the training starts from; None: a new one
    taught: Sequence[RecordedAnswer]
    held_out: Sequence[RecordedAnswer]


class DrafterTraining(ABC):
    """The training of a draft or head."""

    @abstractmethod
    def num_parameters(self) -> int: ...

    @abstractmethod
    def measure(self, did_one: DidOne) -> list[TrafficAcceptance]:
        """Returns the acceptance on the held-out answers. Calls `did_one` after each answer."""

    @abstractmethod
    def train(self, recipe: Recipe, did_step: Callable[[float], object]) -> None:
        """Trains on the answers that are not held out. Calls `did_step` with the loss of each step."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the folder for `draft.model` in bfloat16, and loads it, so that `measure` uses the saved weights."""


class DraftTraining(DrafterTraining):
    """A draft model. If `is_parallel`, it learns to draft all tokens of a proposal in one step."""

    def __init__(self, task: TrainingTask, did_one: DidOne, *, is_parallel: bool) -> None:
        """Runs the target on all answers, and calls `did_one` after each of them."""
        self._target_folder, self._is_parallel = task.target_folder, is_parallel
        num_taught, seed = len(task.taught), task.arguments.seed
        lessons = teach(task.target, [*task.taught, *task.held_out], seed, did_one)
        self._taught, self._held_out = lessons[:num_taught], lessons[num_taught:]
        self._draft = _new_draft(task) if task.draft_folder is None else load_draft(task.draft_folder)
        self._has_masks = is_parallel and getattr(self._draft.config, "pard_token", None) is not None

    def num_parameters(self) -> int:
        return self._draft.num_parameters()

    def measure(self, did_one: DidOne) -> list[TrafficAcceptance]:
        return measure_traffic_acceptance(self._draft, self._held_out, did_one, is_parallel=self._has_masks)

    def train(self, recipe: Recipe, did_step: Callable[[float], object]) -> None:
        if not self._is_parallel:
            self._draft.config.pard_token = None  # its masks are not trained any further
        elif not self._has_masks:
            reserved = ModelConfig.from_folder(self._target_folder).eos_token_ids
            lessons: list[Lesson] = [*self._taught, *self._held_out]
            add_mask_token(self._draft, unused_token_id(self._draft.config.vocab_size, lessons, reserved))
            self._has_masks = True
        num_masks = NUM_POSITIONS if self._is_parallel else 0
        train_draft(self._draft, self._taught, recipe, did_step, num_masks=num_masks)

    def save(self, folder: Path) -> None:
        """Writes a Hugging Face folder, with the target's tokenizer."""
        self._draft.to(torch.bfloat16)  # type: ignore[arg-type]
        self._draft.save_pretrained(folder)
        for name in _TOKENIZER_FILES:
            if (self._target_folder / name).is_file():
                shutil.copyfile(self._target_folder / name, folder / name)
        self._draft = load_draft(folder)


def _new_draft(task: TrainingTask) -> LlamaForCausalLM:
    loaded = load_weights(task.target)
    options = task.arguments
    intermediate_size = options.intermediate_size or _DRAFT_INTERMEDIATE_SIZE
    shape = DraftShape(options.hidden_size, options.num_layers, intermediate_size)
    return new_draft(loaded.config, loaded.weights.embedding, shape, options.seed)


class HeadTraining(DrafterTraining):
    """A head on the target's hidden states."""

    _head: TrainableHead

    def __init__(self, task: TrainingTask) -> None:
        loaded = load_weights(task.target)
        self._config, self._ends = loaded.config, TargetEnds.of_engine(loaded)
        self._head = self._new(task) if task.draft_folder is None else self._load(task.draft_folder)
        # If prompt and answer together have fewer than 3 tokens, the answer has no place at which a head drafts.
        answers = [
            [answer for answer in some if len(answer.all_token_ids) > 2] for some in (task.taught, task.held_out)
        ]
        if not all(answers):
            raise ConfigurationError(
                "a head needs answers of at least 3 tokens, prompt included, both to train on and to hold out"
            )
        longest = max(len(answer.all_token_ids) for some in answers for answer in some)
        reader = AnswerReader(loaded, task.target.block_size, longest, self._head.captured_layers)
        self._taught, self._held_out = (HeadLessons(some, reader, self._ends.embedding) for some in answers)

    @abstractmethod
    def _new(self, task: TrainingTask) -> TrainableHead: ...

    @abstractmethod
    def _load(self, folder: Path) -> TrainableHead: ...

    def num_parameters(self) -> int:
        return count_parameters(self._head)

    def measure(self, did_one: DidOne) -> list[TrafficAcceptance]:
        return measure_head(self._head, self._held_out, did_one)

    def train(self, recipe: Recipe, did_step: Callable[[float], object]) -> None:
        train_head(self._head, self._taught, recipe, did_step)

    def save(self, folder: Path) -> None:
        self._write(folder)
        self._head = self._load(folder)

    @abstractmethod
    def _write(self, folder: Path) -> None: ...


class EagleTraining(HeadTraining):
    _head: TrainableEagle

    def _new(self, task: TrainingTask) -> TrainableEagle:
        size = task.arguments.intermediate_size or self._config.intermediate_size
        token_ids = torch.tensor([token for answer in task.taught for token in answer.token_ids])
        counts = torch.bincount(token_ids, minlength=self._config.vocab_size)
        frequent = counts.argsort(descending=True, stable=True)[:_MAX_HEAD_VOCABULARY].sort().values
        return build_head(self._ends, size, frequent, task.arguments.seed)

    def _load(self, folder: Path) -> TrainableEagle:
        return load_head(folder, self._config)

    def _write(self, folder: Path) -> None:
        save_head(self._head, folder)


class MedusaTraining(HeadTraining):
    _head: TrainableMedusa

    def _new(self, task: TrainingTask) -> TrainableMedusa:
        return build_medusa(self._ends, _NUM_MEDUSA_HEADS)

    def _load(self, folder: Path) -> TrainableMedusa:
        return load_medusa(folder, self._ends)

    def _write(self, folder: Path) -> None:
        save_medusa(self._head, folder)


def make_training(task: TrainingTask, did_one: DidOne) -> DrafterTraining:
    """Returns the training for `--drafter`.

    For a draft, the target reads all answers now, and `did_one` is called after each. Raises ConfigurationError if the
    draft or head to start from cannot be loaded, or if a head has no answers that are long enough.
    """
    drafter = task.arguments.drafter
    if drafter == "eagle":
        return EagleTraining(task)
    if drafter == "medusa":
        return MedusaTraining(task)
    return DraftTraining(task, did_one, is_parallel=drafter == "parallel")
