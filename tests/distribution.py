"""The distribution of whole answers, from that of the next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

NextProbabilities = Callable[[list[int]], dict[int, float]]


def answer_probabilities(
    next_probabilities: NextProbabilities, prompt: Sequence[int], num_tokens: int
) -> dict[tuple[int, ...], float]:
    """The probability of every answer of `num_tokens` tokens to `prompt`."""
    answers: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        answers = {
            (*answer, token): probability * next_probability
            for answer, probability in answers.items()
            for token, next_probability in next_probabilities([*prompt, *answer]).items()
        }
    return answers
