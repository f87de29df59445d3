"""Computes the target's choices at every place of an answer: the labels that a draft learns."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.config.workers import TargetConfig
from cluster.engine.batch import Segment, slots_of
from cluster.engine.loader import LoadedModel
from cluster.engine.runner import ModelRunner, load_weights
from services.training.traffic import RecordedAnswer

NUM_LIKELIEST = 24  # tokens whose probability a label holds
NUM_DRAWN = 40  # tokens that represent all the others
_LEAST = 1e-30  # weight of the likeliest tokens when others are drawn; not 0, as `multinomial` needs a positive sum


@dataclass(frozen=True)
class Lesson:
    """An answer with the target's likeliest tokens at each place, and samples of the others.

    Each sample represents an equal share of the other tokens' total probability. So the expected cross entropy with
    such a label is that with the whole distribution. If the other tokens were left out, or merged into one, the draft
    would become more confident than its target (Anshumann et al. 2025, "Sparse logit sampling: accelerating knowledge
    distillation in LLMs").
    """

    answer: RecordedAnswer
    likeliest: npt.NDArray[np.int32]  # [len(answer.token_ids), NUM_LIKELIEST]
    probabilities: npt.NDArray[np.float32]  # at temperature 1, in the same shape
    drawn: npt.NDArray[np.int32]  # [len(answer.token_ids), NUM_DRAWN]


class AnswerReader:
    """Computes a target's logits and hidden states for recorded answers, one at a time, in the serving engine."""

    def __init__(self, loaded: LoadedModel, block_size: int, longest: int, captured_layers: tuple[int, ...]) -> None:
        """`longest`: number of tokens of the longest answer and its prompt. `captured_layers`: as in `ModelConfig`."""
        loaded = replace(loaded, config=replace(loaded.config, captured_layers=captured_layers))
        self._runner = ModelRunner(loaded, block_size, -(-longest // block_size), enable_prefix_caching=False)
        self._runner.model.prepare(longest, longest)

    def read(self, answer: RecordedAnswer) -> tuple[Tensor, Tensor | None]:
        """Returns the target's logits at each place of `answer`, and the captured states.

        The logits are float32 [len(answer.token_ids), vocab_size]. The states are float32 [tokens - 1, state_size], of
        all tokens, including the prompt's, except the last; None if none are captured.
        """
        runner, token_ids = self._runner, list(answer.all_token_ids[:-1])
        table = runner.blocks.allocate(runner.blocks.num_blocks_for(len(token_ids)))
        assert table is not None
        logits = runner.run([Segment(token_ids, 0, table, num_logits=len(answer.token_ids))])
        states = None
        if runner.model.config.captured_layers:
            slots = slots_of(range(len(token_ids)), table, runner.blocks.block_size)
            states = runner.states[slots].float().cpu()
        runner.blocks.free(table)
        return logits.float().cpu(), states


def teach(
    config: TargetConfig, answers: Iterable[RecordedAnswer], seed: int, did_one: Callable[[], object]
) -> list[Lesson]:
    """Runs the target of `config` over each answer once, in the engine that serves it.

    Calls `did_one` after each answer. Raises ConfigurationError if the target cannot be loaded.
    """
    loaded = load_weights(config)
    answers = list(answers)
    longest = max(len(answer.all_token_ids) for answer in answers)
    reader = AnswerReader(loaded, config.block_size, longest, captured_layers=())
    lessons, end = [], 0
    # All labels are kept in three arrays. Arrays for each answer would lie between the logits of one answer and those
    # of the next, so that the memory of the logits is never reused: 17 GB with a vocabulary of 49,152 tokens.
    num_places = sum(len(answer.token_ids) for answer in answers)
    likeliest = np.empty((num_places, NUM_LIKELIEST), np.int32)
    probabilities = np.empty((num_places, NUM_LIKELIEST), np.float32)
    drawn = np.empty((num_places, NUM_DRAWN), np.int32)
    generator = torch.Generator().manual_seed(seed)
    for answer in answers:
        logits, _ = reader.read(answer)
        others = logits.softmax(dim=-1)
        best = others.topk(NUM_LIKELIEST, dim=-1)
        own = slice(end, end := end + len(answer.token_ids))
        likeliest[own], probabilities[own] = best.indices.numpy(), best.values.numpy()
        others.scatter_(1, best.indices, _LEAST)
        drawn[own] = others.multinomial(NUM_DRAWN, replacement=True, generator=generator).numpy()
        lessons.append(Lesson(answer, likeliest[own], probabilities[own], drawn[own]))
        did_one()
    return lessons
