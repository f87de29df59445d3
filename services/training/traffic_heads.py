"""Trains a head on its target's hidden states in the target's own answers, and measures its acceptance.

The target reads an answer each time its states are needed, so only one answer's states are in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.training.heads import TrainableHead, coupled_loss
from services.training.recipe import Recipe
from services.training.teaching import AnswerReader
from services.training.traffic import RecordedAnswer
from services.training.traffic_acceptance import NUM_POSITIONS, TrafficAcceptance, acceptance_by_temperature, choices
from services.training.traffic_loop import train_on_answers


@dataclass(frozen=True)
class HeadLessons:
    """Training data of a head: answers, and the target that reads them."""

    answers: Sequence[RecordedAnswer]  # each has at least 3 tokens, including its prompt
    reader: AnswerReader
    embedding: Tensor  # [vocab_size, hidden_size]


def train_head(head: TrainableHead, lessons: HeadLessons, recipe: Recipe, did_step: Callable[[float], object]) -> None:
    """Trains `head` in place. The loss is the mean `coupled_loss` of its steps.

    `did_step` and errors: see `train_on_answers`.
    """
    target_ids = head.target_ids

    def backward(chosen: Sequence[int], _: np.random.Generator) -> float:
        total = 0.0
        for index in chosen:
            answer = lessons.answers[index]
            of_target, steps = _steps(head, lessons, answer, head.num_trained_steps)
            of_target = of_target.softmax(dim=-1)[:, target_ids]
            losses = [coupled_loss(logits, of_target[places]) for places, logits in steps]
            loss = torch.stack(losses).mean() / len(chosen)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    train_on_answers(head, lessons.answers, recipe, backward, did_step)


@torch.no_grad()
def measure_head(head: TrainableHead, lessons: HeadLessons, did_one: Callable[[], object]) -> list[TrafficAcceptance]:
    """Returns the acceptance at each temperature of the answers, as `measure_traffic_acceptance` does for a draft.

    Calls `did_one` after each answer.
    """
    return acceptance_by_temperature(
        ((answer.temperature, _matches(head, lessons, answer)) for answer in lessons.answers), did_one
    )


def _matches(head: TrainableHead, lessons: HeadLessons, answer: RecordedAnswer) -> Tensor:
    """Returns which drafts match the target's choices, bool [places, NUM_POSITIONS]."""
    of_target, steps = _steps(head, lessons, answer, NUM_POSITIONS)
    token_ids, num_places = torch.tensor(answer.token_ids), len(answer.token_ids)
    matches = torch.zeros(num_places, NUM_POSITIONS, dtype=torch.bool)
    for step, (places, logits) in enumerate(steps):
        scores = torch.full((len(logits), of_target.shape[-1]), -torch.inf)
        scores.index_copy_(1, head.target_ids, logits.float())
        own = choices(scores, answer, range(num_places)[places])
        matches[places.start - step : num_places - step, step] = own == token_ids[places]
    return matches


def _steps(
    head: TrainableHead, lessons: HeadLessons, answer: RecordedAnswer, num_steps: int
) -> tuple[Tensor, Iterator[tuple[slice, Tensor]]]:
    """Returns the target's logits at each place of `answer`, and the head's steps.

    A step is a pair: the places that it predicts, and its logits there. No place is beyond the end of the answer. If
    the prompt has one token, the first place has no proposal, because the target has no state before that token.
    """
    of_target, states = lessons.reader.read(answer)
    assert states is not None
    tokens = torch.tensor(answer.all_token_ids[:-1])
    embeddings = functional.pad(functional.embedding(tokens, lessons.embedding), (0, 0, 0, num_steps - 1))
    num_prompt, num_places = len(answer.prompt_token_ids), len(answer.token_ids)
    position = max(0, num_prompt - 2)  # the first step predicts the token at `position` + 2
    first_place = position + 2 - num_prompt
    steps = head.step_logits(embeddings[None], states[None], num_steps, slice(position, None))

    def predicted() -> Iterator[tuple[slice, Tensor]]:
        for step, logits in enumerate(steps):
            places = slice(first_place + step, num_places)
            if places.start < places.stop:
                yield places, logits[0, : places.stop - places.start]

    return of_target, predicted()
