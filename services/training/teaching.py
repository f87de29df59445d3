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
_LEAST = 1e-30  # replaces 0: some token has to be drawn even if no other token has a probability


@dataclass(frozen=True)
class Lesson:
    """An answer with the target's likeliest tokens at each of its places, and tokens drawn from among the others.

    These stand for what the others have together, each for an equal part: the cross entropy with such a label is that
    with the whole distribution, on average. Where the others are left out, or are one, the draft grows surer than its
    target is (Anshumann et al. 2025, "Sparse logit sampling: accelerating knowledge distillation in LLMs").
    """

    answer: RecordedAnswer
    likeliest: npt.NDArray[np.int32]  # [len(answer.token_ids), NUM_LIKELIEST]
    probabilities: npt.NDArray[np.float32]  # at temperature 1, in the same shape
    drawn: npt.NDArray[np.int32]  # [len(answer.token_ids), NUM_DRAWN]


def teach(
    config: TargetConfig, answers: Iterable[RecordedAnswer], seed: int, did_one: Callable[[], object]
) -> list[Lesson]:
    """Has the target of `config` read each answer once, by the engine that serves it. Raises ConfigurationError."""
    loaded = load_weights(config, dtype_on_cpu=torch.bfloat16)
    answers = list(answers)
    longest = max(len(answer.all_token_ids) for answer in answers)
    num_blocks = -(-longest // config.block_size)
    runner = ModelRunner(loaded, config.block_size, num_blocks, enable_prefix_caching=False)
    runner.model.prepare(longest, longest)
    lessons, end = [], 0
    # All labels in three pieces: kept one by one they come to lie between the logits of one answer and those of the
    # next, whose memory is then never used again, 17 GB of it at a vocabulary of 49,152.
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
