"""Computes the target's choices at every place of an answer: the labels that a draft learns."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cluster.config.workers import TargetConfig
from cluster.engine.batch import Segment
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


def teach(
    config: TargetConfig, answers: Iterable[RecordedAnswer], seed: int, did_one: Callable[[], object]
) -> list[Lesson]:
    """Runs the target of `config` over each answer once, in the engine that serves it.

    Calls `did_one` after each answer. Raises ConfigurationError if the target cannot be loaded.
    """
    loaded = load_weights(config, dtype_on_cpu=torch.bfloat16)
    answers = list(answers)
    longest = max(len(answer.all_token_ids) for answer in answers)
    num_blocks = -(-longest // config.block_size)
    runner = ModelRunner(loaded, config.block_size, num_blocks, enable_prefix_caching=False)
    runner.model.prepare(longest, longest)
    lessons, end = [], 0
    # All labels are kept in three arrays. Arrays for each answer would lie between the logits of one answer and those
    # of the next, so that the memory of the logits is never reused: 17 GB with a vocabulary of 49,152 tokens.
    num_places = sum(len(answer.token_ids) for answer in answers)
    likeliest = np.empty((num_places, NUM_LIKELIEST), np.int32)
    probabilities = np.empty((num_places, NUM_LIKELIEST), np.float32)
    drawn = np.empty((num_places, NUM_DRAWN), np.int32)
    generator = torch.Generator().manual_seed(seed)
    for answer in answers:
        read, asked = list(answer.all_token_ids[:-1]), len(answer.token_ids)
        table = runner.blocks.allocate(runner.blocks.num_blocks_for(len(read)))
        assert table is not None
        logits = runner.run([Segment(read, 0, table, num_logits=asked)])
        runner.blocks.free(table)
        others = logits.float().softmax(dim=-1).cpu()
        best = others.topk(NUM_LIKELIEST, dim=-1)
        own = slice(end, end := end + asked)
        likeliest[own], probabilities[own] = best.indices.numpy(), best.values.numpy()
        others.scatter_(1, best.indices, _LEAST)
        drawn[own] = others.multinomial(NUM_DRAWN, replacement=True, generator=generator).numpy()
        lessons.append(Lesson(answer, likeliest[own], probabilities[own], drawn[own]))
        did_one()
    return lessons
