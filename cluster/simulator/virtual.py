"""A simulated target and its draft workers in virtual time, stepped by the caller.

There are no sleeps and no network: a minute of a cluster takes a few seconds, and every run has the same result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cluster.config import Config
from cluster.engine.blocks import BlockManager
from cluster.simulator.drafts import VOCAB_SIZE, SimulatedDraft, VirtualDraft, VirtualPool, target_limits
from cluster.simulator.turns import VirtualTime
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationOutput, GenerationRequest
from cluster.targets.simulated import SimulatedTarget

_NUM_BLOCKS = 1_000_000


def simulated_request(
    seed: int,
    vocab_size: int,
    prompt_len: int,
    max_tokens: int,
    num_speculative_tokens: int | None,
    token_ids: Sequence[int] = (),
) -> GenerationRequest:
    """Returns a request to a simulated target. The answer depends only on `seed`.

    Without `token_ids`, the prompt has `prompt_len` tokens and shares no KV with other requests.
    """
    return GenerationRequest(
        request_id=str(seed),
        token_ids=[*token_ids] or [(seed * 31 + place) % vocab_size for place in range(prompt_len)],
        num_prompt_tokens=len(token_ids) or prompt_len,
        params=SamplingParams(),
        noise_key=NoiseKey.derive(seed, 0),
        max_tokens=max_tokens,
        ignore_eos=True,
        num_speculative_tokens=num_speculative_tokens,
        cache_salt="" if token_ids else str(seed),
    )


@dataclass(slots=True)
class VirtualCluster:
    """One target and its `drafts`. Without `drafts`, it has the draft workers of `config`, which are identical."""

    config: Config
    drafts: Sequence[SimulatedDraft] = ()
    on_step: Callable[[Sequence[GenerationOutput]], None] = lambda outputs: None
    make_target: Callable[..., SimulatedTarget] = SimulatedTarget
    time: VirtualTime = field(default_factory=VirtualTime)
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_rounds: int = 0  # sequences in steps
    pool: VirtualPool = field(init=False)
    target: SimulatedTarget = field(init=False)
    seeds: Iterator[int] = field(default_factory=itertools.count)  # seeds of the requests, each used once

    def __post_init__(self) -> None:
        config, simulation = self.config, self.config.simulation
        alike = [SimulatedDraft(simulation, round_trip_seconds=simulation.round_trip_ms / 1e3)] * config.draft.replicas
        drafts = [VirtualDraft(index, wanted, config) for index, wanted in enumerate(self.drafts or alike)]
        self.pool = VirtualPool(self.time, config.placement.trial_share, drafts)
        blocks = BlockManager(_NUM_BLOCKS, config.target.block_size, enable_prefix_caching=False)
        limits, speculation = target_limits(config), config.speculation
        self.target = self.make_target(simulation, VOCAB_SIZE, limits, blocks, self.pool, speculation, self.time)
        for draft in drafts:
            draft.start()
        self.target.profile()

    def submit(self, max_tokens: int, *, prompt_len: int = 8, num_speculative_tokens: int | None = None) -> str:
        """Submits a request; returns its ID, which is its seed."""
        seed = next(self.seeds)
        request = simulated_request(seed, VOCAB_SIZE, prompt_len, max_tokens, num_speculative_tokens)
        self.target.submit(request)
        return request.request_id

    def run(self, seconds: float) -> float:
        """Runs steps for `seconds` while there are requests. Returns the committed tokens per second."""
        started_at, before = self.time.now(), self.num_tokens
        while self.time.now() < started_at + seconds and self.step():
            pass
        return (self.num_tokens - before) / max(self.time.now() - started_at, 1e-9)

    def step(self) -> bool:
        """Runs one step of the target. Returns False if there is no work."""
        return self.target.run_step(self._publish)

    def readings(self, name: str) -> dict[tuple[str, ...], float]:
        """Returns the target's metric `name`, by the values of its labels."""
        found = [reading for reading in self.target.readings() if reading.name == name]
        return {tuple(reading.labels.values()): reading.value for reading in found}

    def _publish(self, outputs: Sequence[GenerationOutput]) -> None:
        self.num_tokens += sum(len(output.token_ids) for output in outputs)
        self.num_draft_tokens += sum(output.num_draft_tokens for output in outputs)
        self.num_rounds += len(outputs)
        self.on_step(outputs)
