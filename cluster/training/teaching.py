"""What a target would have said at every place of an answer: the labels that a draft learns."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cluster.config import TargetConfig
from cluster.engine.batch import Segment
from cluster.engine.runner import ModelRunner, load_weights
from cluster.training.traffic import Answer

NUM_LIKELIEST = 24  # tokens that a label has apart; the others are one


@dataclass(frozen=True)
class Lesson:
    """An answer with the target's likeliest tokens at each of its places."""

    answer: Answer
    likeliest: npt.NDArray[np.int32]  # [len(answer.token_ids), NUM_LIKELIEST]
    probabilities: npt.NDArray[np.float32]  # likewise, at temperature 1


def teach(config: TargetConfig, answers: Iterable[Answer], did_one: Callable[[], object]) -> list[Lesson]:
    """Has the target of `config` read each answer once, by the engine that serves it. Raises ConfigurationError."""
    loaded = load_weights(config, dtype_on_cpu=torch.bfloat16)
    answers = list(answers)
    longest = max(len(answer.all_token_ids) for answer in answers)
    num_blocks = -(-longest // config.block_size)
    runner = ModelRunner(loaded, config.block_size, num_blocks, enable_prefix_caching=False)
    runner.model.prepare(longest, longest)
    lessons, end = [], 0
    # All labels in two pieces: kept one by one they come to lie between the logits of one answer and those of the next,
    # whose memory is then never used again, 17 GB of it at a vocabulary of 49,152.
    num_places = sum(len(answer.token_ids) for answer in answers)
    likeliest = np.empty((num_places, NUM_LIKELIEST), np.int32)
    probabilities = np.empty((num_places, NUM_LIKELIEST), np.float32)
    for answer in answers:
        read, asked = list(answer.all_token_ids[:-1]), len(answer.token_ids)
        table = runner.blocks.allocate(runner.blocks.num_blocks_for(len(read)))
        assert table is not None
        logits = runner.run([Segment(read, 0, table, num_logits=asked)])
        runner.blocks.free(table)
        best = logits.float().softmax(dim=-1).topk(NUM_LIKELIEST, dim=-1)
        own = slice(end, end := end + asked)
        likeliest[own], probabilities[own] = best.indices.cpu().numpy(), best.values.cpu().numpy()
        lessons.append(Lesson(answer, likeliest[own], probabilities[own]))
        did_one()
    return lessons
