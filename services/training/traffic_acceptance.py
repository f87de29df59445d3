"""Measures a draft's acceptance on held-out answers of the target, with the noise that drew them."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from cluster.speculation.noise import NoiseKey, gumbel_noise
from services.training.parallel import mask_rows, parallel_states
from services.training.teaching import Lesson
from services.training.traffic import RecordedAnswer
from services.training.traffic_draft import answer_logits

NUM_SPECULATIVE_TOKENS = 4
NUM_POSITIONS = 8  # positions of a proposal whose acceptance is measured


@dataclass(frozen=True)
class TrafficAcceptance:
    """Acceptance at one temperature.

    `length`: mean tokens committed in a round of `NUM_SPECULATIVE_TOKENS` drafts, including the bonus token; 1 if all
    answers are too short for a round.
    `by_position`: for each position of a proposal, the share of accepted drafts among those whose predecessors are all
    accepted; empty if no answer has `NUM_POSITIONS` tokens.
    """

    temperature: float
    rate: float  # share of first drafts that are accepted
    length: float
    num_tokens: int
    by_position: tuple[float, ...] = ()


@torch.inference_mode()
def measure_traffic_acceptance(
    model: LlamaForCausalLM,
    lessons: Sequence[Lesson],
    did_one: Callable[[], object] = lambda: None,
    *,
    is_parallel: bool = False,
) -> list[TrafficAcceptance]:
    """Returns the acceptance at each temperature of the answers.

    Compares the draft's proposal at each place of the answers with the target's choices. `is_parallel`: whether all
    drafts of a proposal are made in one step, from mask tokens. Calls `did_one` after each answer.
    """
    matches_of = _parallel_matches if is_parallel else _matches
    return acceptance_by_temperature(
        ((lesson.answer.temperature, matches_of(model, lesson)) for lesson in lessons), did_one
    )


def acceptance_by_temperature(
    answers: Iterable[tuple[float, Tensor]], did_one: Callable[[], object]
) -> list[TrafficAcceptance]:
    """Returns the acceptance at each temperature.

    `answers`: temperature and matches of each answer. The matches, bool [places, NUM_POSITIONS], are true for drafts of
    the proposal at each place that equal the target's choices. Calls `did_one` after each answer.
    """
    matches: dict[float, list[Tensor]] = {}
    for temperature, own in answers:
        matches.setdefault(temperature, []).append(own)
        did_one()
    return [_acceptance(temperature, rows) for temperature, rows in sorted(matches.items())]


def _acceptance(temperature: float, answers: Sequence[Tensor]) -> TrafficAcceptance:
    """Returns the acceptance. `answers`: matches, [places, NUM_POSITIONS] each."""
    first = torch.cat([matches[:, 0] for matches in answers])
    rounds = [
        matches[:-NUM_SPECULATIVE_TOKENS, :NUM_SPECULATIVE_TOKENS].long().cumprod(dim=-1).sum(dim=-1).tolist()
        for matches in answers
        if len(matches) > NUM_SPECULATIVE_TOKENS
    ]
    whole = torch.cat([matches[: max(0, len(matches) + 1 - NUM_POSITIONS)] for matches in answers])
    survivors = [len(whole), *whole.long().cumprod(dim=-1).sum(dim=0).tolist()]
    return TrafficAcceptance(
        temperature,
        rate=int(first.sum()) / max(1, len(first)),
        length=mean_committed(rounds) if rounds else 1.0,
        num_tokens=len(first),
        by_position=tuple(
            after / max(1, before) for before, after in itertools.pairwise(survivors if len(whole) else ())
        ),
    )


def _matches(model: LlamaForCausalLM, lesson: Lesson) -> Tensor:
    """Returns which drafts match the target's choices, bool [places, NUM_POSITIONS].

    Each place of the answer has a proposal. Each of its drafts is made after the target's own tokens. Drafts beyond the
    end of the answer are False.
    """
    own = choices(answer_logits(model, [lesson]), lesson.answer, range(len(lesson.answer.token_ids)))
    padded = torch.nn.functional.pad(own == torch.tensor(lesson.answer.token_ids), (0, NUM_POSITIONS - 1))
    return padded.unfold(0, NUM_POSITIONS, 1)


def _parallel_matches(model: LlamaForCausalLM, lesson: Lesson) -> Tensor:
    """Returns the same as `_matches`, for proposals that are made in one step."""
    token_ids = lesson.answer.token_ids
    masks = mask_rows(len(token_ids), NUM_POSITIONS - 1)
    (states,) = parallel_states(model, [lesson], [masks], model.config.pard_token)
    labels = [*range(len(token_ids)), *masks.labels]
    own = choices(model.lm_head(states), lesson.answer, labels)
    matches = torch.zeros(len(token_ids), NUM_POSITIONS, dtype=torch.bool)
    places = torch.tensor([*range(len(token_ids)), *masks.places])
    offsets = torch.tensor([*(0 for _ in token_ids), *masks.offsets])
    matches[places, offsets] = own == torch.tensor([token_ids[label] for label in labels])
    return matches


def choices(logits: Tensor, answer: RecordedAnswer, places: Sequence[int]) -> Tensor:
    """Returns the tokens that `logits` choose with the noise of the tokens of `answer` at `places`.

    `logits` has one row for each of `places`.
    """
    scores = logits.float()
    if answer.temperature > 0:
        key, first = NoiseKey.derive(answer.seed, 0), len(answer.prompt_token_ids)
        draws = [(key, first + place) for place in places]
        scores = scores / answer.temperature + torch.from_numpy(gumbel_noise(draws, scores.shape[-1]))
    return scores.argmax(dim=-1)


def mean_committed(num_accepted: list[list[int]]) -> float:
    """Returns the mean number of tokens committed per round, over the rounds along each row.

    ``num_accepted``: for each position of a row, the number of accepted drafts of a round that begins there.
    """
    num_rounds = num_committed = 0
    for row in num_accepted:
        position = 0
        while position < len(row):
            num_committed += row[position] + 1
            position += row[position] + 1
            num_rounds += 1
    return num_committed / num_rounds
