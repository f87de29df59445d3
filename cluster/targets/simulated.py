"""A target without a model, for load, fault and planning runs: step times are configured, tokens are hashes."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config.simulation import SimulationConfig
from cluster.config.speculation import SpeculationConfig
from cluster.constraints import UNCONSTRAINED
from cluster.coordination.base import LinkPool
from cluster.engine.blocks import BlockManager
from cluster.engine.limits import StepLimits
from cluster.errors import InvalidRequestError
from cluster.logprobs import TokenLogprobs
from cluster.simulated_engines.steps import REAL_TIME, StepCurve, Timekeeper
from cluster.simulated_engines.tokens import token_at
from cluster.speculation.drafts import depths_of
from cluster.targets.base import GenerationRequest, TargetModel
from cluster.targets.step_loop import ReadChoices, StepLoop
from cluster.targets.token_generator import Scheduled


class SimulatedTarget(StepLoop):
    """Schedules, manages blocks and runs rounds like other targets; simulates the forward pass and the sampling.

    The token at a position depends only on the noise key and the position. No token ends a sequence.
    """

    def __init__(
        self,
        simulation: SimulationConfig,
        vocab_size: int,
        limits: StepLimits,
        blocks: BlockManager,
        pool: LinkPool,
        speculation: SpeculationConfig,
        time: Timekeeper = REAL_TIME,
    ) -> None:
        model = TargetModel("simulated", dtype="simulated", vocab_size=vocab_size, eos_token_ids=())
        super().__init__(model, limits, blocks, pool, speculation, time.now)
        self._keeper = time
        self._curve = StepCurve(simulation.target_step_ms)
        self._sequence_seconds = simulation.target_sequence_ms / 1e3

    def _launch(self, step: Sequence[Scheduled]) -> ReadChoices:
        started_at = self._keeper.now()
        choices: list[int] = []
        for scheduled in step:
            if scheduled.yields_choices:
                key, vocab_size = scheduled.sequence.request.noise_key, self.model.vocab_size
                choices += [token_at(key, position, vocab_size) for position in _positions(scheduled)]
        self._keeper.sleep_until(started_at + self._step_seconds(step))
        return lambda: choices

    def _step_seconds(self, step: Sequence[Scheduled]) -> float:
        num_rows = sum([scheduled.num_new_tokens + len(scheduled.drafts.token_ids) for scheduled in step])
        return self._curve.at(num_rows) + self._sequence_seconds * len(step)

    def submit(self, request: GenerationRequest) -> None:
        is_scored = request.num_logprobs is not None or request.num_prompt_logprobs is not None
        if is_scored or request.constraints != UNCONSTRAINED:
            raise InvalidRequestError(
                "a simulated engine supports neither log-probabilities nor constraints of its answers"
            )
        super().submit(request)

    def _score(self, rows: Sequence[int], token_ids: Sequence[int], width: int) -> TokenLogprobs:
        raise AssertionError("a simulated engine got a request for log-probabilities")

    def _keep(self, block_table: Sequence[int], start: int, nodes: Sequence[int]) -> None:
        """Does nothing: there is no KV."""

    def _time_step(self, num_rows: int) -> float | None:
        return self._curve.at(num_rows) + self._sequence_seconds


def _positions(scheduled: Scheduled) -> Sequence[int]:
    """Returns the positions of the chosen tokens: after the last committed one, and after every draft."""
    start, parents = len(scheduled.sequence.token_ids), scheduled.drafts.parents
    if parents is None:
        return range(start, start + len(scheduled.drafts) + 1)
    return [start, *(start + depth for depth in depths_of(parents))]
