"""The workers as the page shows them: state, steps and answers, without their addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from protos.speculation.v1 import target_pb2
from services.router.targets.replicas import Replica, ReplicaPool

_MAX_TARGETS = 16


class Workers:
    """Polls the targets of `pool` for their steps and answers since the last poll."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self._seen: dict[str, target_pb2.Observation] = {}  # the last observation, by address

    async def observe(self) -> Mapping[str, Any]:
        replicas = self._pool.replicas[:_MAX_TARGETS]
        observations = await asyncio.gather(*map(self._ask, replicas))
        self._seen = {
            replica.address: observation
            for replica, observation in zip(replicas, observations, strict=True)
            if observation is not None
        }
        drafts = sorted({address for observation in self._seen.values() for address in _drafts(observation)})
        names = {address: f"draft {number}" if address else "draft" for number, address in _counted(drafts)}
        return {
            "targets": [
                _state(f"target {number}", replica, observation, names)
                for number, (replica, observation) in enumerate(zip(replicas, observations, strict=True), start=1)
            ],
            "num_targets": len(self._pool.replicas),
            "num_up": sum(replica.status == "up" for replica in self._pool.replicas),
            "num_running": sum(replica.num_in_flight for replica in self._pool.replicas),
        }

    async def _ask(self, replica: Replica) -> target_pb2.Observation | None:
        seen = self._seen.get(replica.address, target_pb2.Observation())
        request = target_pb2.ObserveRequest(from_step=seen.next_step, from_answer=seen.next_answer)
        observation = await replica.observe(request)
        if observation is not None and seen.epoch not in (0, observation.epoch):  # the worker was restarted
            observation = await replica.observe(target_pb2.ObserveRequest())
        return observation


def _state(
    name: str, replica: Replica, observation: target_pb2.Observation | None, names: Mapping[str, str]
) -> dict[str, Any]:
    state: dict[str, Any] = {"name": name, "status": replica.status}
    description = replica.description
    if description is not None:
        state |= {
            "model": description.model.name,
            "dtype": description.model.dtype,
            "running": description.load.num_running,
            "waiting": description.load.num_waiting,
            "kv": [description.load.num_used_blocks, description.load.num_blocks],
            "late": [description.load.num_late, description.load.num_limited],
            "links": [description.num_draft_links, description.num_draft_links_configured],
            "k": description.num_speculative_tokens,
        }
    if observation is not None:
        state |= {
            "tells_steps": observation.tells_steps,
            "steps": [
                [
                    round(span.ended_at, 6),
                    round(span.waited_seconds, 6),
                    round(span.seconds, 6),
                    span.num_sequences,
                    span.num_rows,
                    int(span.has_prompts),
                ]
                for span in observation.steps
            ],
            "answers": [
                [
                    names[span.draft],
                    round(span.came_at, 6),
                    round(span.seconds, 6),
                    round(span.held_seconds, 6),
                    round(span.step_seconds, 6),
                    span.batch,
                    span.num_proposals,
                ]
                for span in observation.answers
            ],
            "readings": [
                [reading.name, {key: names.get(value, value) for key, value in reading.labels.items()}, reading.value]
                for reading in observation.readings
            ],
        }
    return state


def _drafts(observation: target_pb2.Observation) -> set[str]:
    """Returns the addresses of the draft workers in `observation`."""
    labelled = {reading.labels["draft"] for reading in observation.readings if "draft" in reading.labels}
    return labelled | {span.draft for span in observation.answers}


def _counted(drafts: list[str]) -> enumerate[str]:
    return enumerate(drafts, start=0 if "" in drafts else 1)  # a drafter in the target's process has no number
