"""The section `simulation`: behaviour of simulated engines."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, PositiveInt

from cluster.config.types import NotNegative, Section, Share


def _ascending(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    counts = [count for count, _ in points]
    if counts != sorted(set(counts)):
        raise ValueError("the first numbers of the pairs must ascend")
    return points


_Curve = Annotated[
    tuple[tuple[PositiveInt, NotNegative], ...], Field(min_length=1), AfterValidator(_ascending)
]  # linear between points; beyond the last along the last slope


class SimulationConfig(Section):
    """Settings of simulated engines; curves are linear between their points, and continue beyond the last one."""

    vocab_size: PositiveInt | None = Field(
        None, description="tokens in the vocabulary; null: the vocabulary of the target's model"
    )
    target_step_ms: _Curve = Field(
        ((1, 24.0), (4, 26.0), (8, 38.0), (16, 56.0), (32, 100.0), (64, 180.0)),
        description="time of a step of the target: pairs of rows and ms",
    )
    target_sequence_ms: NotNegative = Field(0.0, description="ms added to a step of the target per sequence")
    draft_step_ms: _Curve = Field(
        ((1, 0.8), (16, 1.7)), description="time of a step of the drafter: pairs of rows and ms"
    )
    draft_context_ms: tuple[NotNegative, NotNegative] = Field(
        (0.0, 0.0),
        description="ms added to a step of the drafter for each 1,000 tokens that a sequence in it has read: once, and "
        "for each row of the sequence; the larger counts",
    )
    acceptance: Share | Annotated[tuple[Share, ...], Field(min_length=1)] = Field(
        0.75,
        description="probability that a draft is right when all before it are: one number, or one for each place in "
        "the proposal; the last holds for further places",
    )
    is_one_pass: bool = Field(
        False,
        description="whether the drafter makes all tokens of a proposal in one step, as `draft.drafter: parallel` does",
    )
    acceptance_schedule: Annotated[tuple[tuple[NotNegative, Share], ...], AfterValidator(_ascending)] = Field(
        (),
        description="pairs of seconds since the drafter's first sequence and the acceptance from then on",
    )
    round_trip_ms: NotNegative = Field(
        0.0, description="round trip in ms that the launcher adds between target and draft, with a delaying proxy"
    )
    loss: Share = Field(0.0, description="share of the proxy's chunks that arrive 200 ms late")

    @property
    def needs_proxy(self) -> bool:
        return self.round_trip_ms > 0 or self.loss > 0
