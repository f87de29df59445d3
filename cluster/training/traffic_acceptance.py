"""How often a draft proposes what its target has said, on held-out answers, with the noise that drew them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from cluster.speculation.noise import NoiseKey, gumbel_noise
from cluster.training.evaluate import NUM_SPECULATIVE_TOKENS, acceptance_length
from cluster.training.teaching import Lesson
from cluster.training.traffic_draft import answer_logits


@dataclass(frozen=True)
class TrafficAcceptance:
    """At one temperature. `length`: tokens committed in a round of `NUM_SPECULATIVE_TOKENS`, the bonus token included;
    1 where no answer is as long."""

    temperature: float
    rate: float
    length: float
    num_tokens: int


@torch.inference_mode()
def measure_traffic_acceptance(
    model: LlamaForCausalLM, lessons: Sequence[Lesson], did_one: Callable[[], object] = lambda: None
) -> list[TrafficAcceptance]:
    """Of the draft's choice at each place of the answers, given all before it, against the target's."""
    matches: dict[float, list[list[bool]]] = {}
    for lesson in lessons:
        answer = lesson.answer
        scores = answer_logits(model, [lesson]).float()
        if answer.temperature > 0:
            key, first = NoiseKey.derive(answer.seed, 0), len(answer.prompt_token_ids)
            draws = [(key, first + place) for place in range(len(answer.token_ids))]
            scores = scores / answer.temperature + torch.from_numpy(gumbel_noise(draws, scores.shape[-1]))
        own = scores.argmax(dim=-1).tolist()
        row = [a == b for a, b in zip(own, answer.token_ids, strict=True)]
        matches.setdefault(answer.temperature, []).append(row)
        did_one()
    return [
        TrafficAcceptance(
            temperature,
            sum(map(sum, rows)) / max(1, sum(map(len, rows))),
            _length([row for row in rows if len(row) > NUM_SPECULATIVE_TOKENS]),
            sum(map(len, rows)),
        )
        for temperature, rows in sorted(matches.items())
    ]


def _length(rows: list[list[bool]]) -> float:
    return acceptance_length(rows, NUM_SPECULATIVE_TOKENS) if rows else 1.0
