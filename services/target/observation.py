"""Observation of a target for the page: its last steps, its drafters' answers, and some of its metrics."""

from __future__ import annotations

from cluster.targets.base import Target
from protos.speculation.v1 import target_pb2

_READINGS = frozenset(
    {
        "outrider_steps",
        "outrider_step_seconds",
        "outrider_link_round_trip_seconds",
    }
)


def observe(target: Target, request: target_pb2.ObserveRequest, epoch: int) -> target_pb2.Observation:
    """Returns the observation for `request`, from the worker with that `epoch`."""
    observation = target_pb2.Observation(
        epoch=epoch,
        readings=[
            target_pb2.ObservedReading(name=reading.name, labels=reading.labels, value=reading.value)
            for reading in target.readings()
            if reading.name in _READINGS
        ],
    )
    timeline = target.timeline
    if timeline is not None:
        observation.tells_steps = True
        observation.next_step, steps = timeline.steps.since(request.from_step)
        observation.next_answer, answers = timeline.answers.since(request.from_answer)
        observation.steps.extend(target_pb2.StepSpan(**span._asdict()) for span in steps)
        observation.answers.extend(target_pb2.AnswerSpan(**span._asdict()) for span in answers)
    return observation
