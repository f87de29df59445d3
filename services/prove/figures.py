"""Figures of the results: times over all answers, and the raw figures for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.prove.measure import Result


@dataclass(frozen=True, slots=True)
class Times:
    """Times of all answers, in seconds."""

    first: list[float]
    between: list[float]  # mean time between tokens, one value per answer
    pauses: list[float]
    whole: list[float]

    @classmethod
    def of(cls, results: Sequence[Result]) -> Times:
        answers = [answer for one in results for answer in one.burst.answers]
        return cls(
            [answer.first_token_seconds for answer in answers],
            [seconds for answer in answers if (seconds := answer.seconds_between_tokens) is not None],
            [gap for answer in answers for gap in answer.token_gaps],
            [answer.last_token_seconds for answer in answers],
        )


def quantile(values: Sequence[float], share: float) -> float | None:
    """Returns the quantile `share` (0.5 is the median) of `values`; None if there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def result_json(one: Result, *, is_streamed: bool) -> dict[str, Any]:
    times = Times.of([one])
    streamed = {"first_token": times.first, "between_tokens": times.between, "pause": times.pauses}
    whole = {"answer": times.whole}
    return {
        "repeat": one.repeat,
        "system": one.system,
        "num_streams": one.num_streams,
        "seconds": one.burst.seconds,
        "tokens_per_second": one.tokens_per_second,
        "num_drafted": one.num_drafted,
        "num_accepted": one.num_accepted,
        "mean_k": one.mean_k,
        "acceptance_length": one.acceptance_length,
        **{
            name: {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99)}
            for name, values in ((streamed if is_streamed else {}) | whole).items()
        },
        "answers": [
            {
                "first_token_seconds": answer.first_token_seconds if is_streamed else None,
                "last_token_seconds": answer.last_token_seconds,
                "token_ids": answer.token_ids,
            }
            for answer in one.burst.answers
        ],
    }
