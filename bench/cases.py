"""Cases of `bench.floor`: a target with its draft on the same GPUs or in a pool, as simulated engines.

Steps take the times that the planner's formulae predict (`cluster.planning`). On the target's GPUs k is the planner's
and fixed, and nothing overlaps, as there is no run-ahead. With a pool the controller chooses k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.in_process import SIMULATED
from cluster.config import Config
from cluster.config.file import load_config
from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import GpuGroup
from cluster.planning.options import BESIDE, PLAIN
from cluster.planning.prediction import ExpectedLoad, Option, Plan
from cluster.planning.round_costs import RUN_AHEAD_HIDES, Drafting
from cluster.planning.steps import Roofline, curve_points
from cluster.targets.base import GenerationOutput

ROUND_TRIPS_MS = (0.2, 0.5, 2.0, 10.0)
_ROWS = (1, 8, 16, 32, 64, 80, 96, 112, 128, 144, 160, 192, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Case:
    """A way to place the draft."""

    option: Option
    draft: Roofline | None
    round_trip_ms: float = 0.0

    @property
    def is_beside(self) -> bool:
        return self.option.name == BESIDE

    @property
    def dollars_per_hour(self) -> float:
        assert self.option.target_dollars_per_hour is not None
        return self.option.target_dollars_per_hour + (self.option.draft_dollars_per_hour or 0.0)

    def config(self, load: ExpectedLoad, planned: Plan, scale: float, more: Sequence[str] = ()) -> Config:
        def curve(steps: Roofline) -> list[tuple[int, float]]:
            return [(rows, scale * ms) for rows, ms in curve_points(steps, load.num_seqs, load.mean_context, _ROWS)]

        target = self.option.target
        assert isinstance(target, Roofline)
        depth = planned.round.num_speculative_tokens if self.is_beside else 4
        settings: dict[str, object] = {
            "simulation.target_step_ms": [list(point) for point in curve(target)],
            "simulation.round_trip_ms": scale * self.round_trip_ms,
            "target.max_num_seqs": 2 * load.num_seqs,
            "target.max_num_batched_tokens": load.max_num_batched_tokens,
            "target.kv_cache_bytes": 2**36,  # of blocks that are counted and never filled
            "target.enable_prefix_caching": "false",
            "draft.max_num_seqs": 2 * load.num_seqs,
            "draft.max_num_batched_tokens": load.max_num_batched_tokens,
            "target.max_prefill_ms": 50 * scale,
            "draft.max_prefill_ms": 50 * scale,
            "speculation.draft_timeout_ms": 1000 * scale,
            "speculation.num_speculative_tokens": 0 if self.draft is None else depth,
        }
        if self.draft is not None and self.option.drafting is not None:
            settings["simulation.draft_step_ms"] = [list(point) for point in curve(self.draft)]
            settings["simulation.acceptance"] = self.option.drafting.acceptance
        if self.draft is None or depth == 0:
            settings["draft.replicas"] = 0
        if self.is_beside:
            settings |= {"speculation.controller": "fixed", "speculation.max_run_ahead": 0}
        return load_config(None, [*SIMULATED, *(f"{key}={value}" for key, value in settings.items()), *more])


@dataclass(slots=True)
class Client:
    """Measurements of one request of a client."""

    num_tokens: int
    asked_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between tokens; those of one step come together
    num_drafts: int = 0
    num_rounds: int = 0

    def take(self, output: GenerationOutput, now: float) -> None:
        if not self.first_at:
            self.first_at = now
            self.gaps += [0.0] * (len(output.token_ids) - 1)
        elif output.token_ids:
            self.gaps += [now - self.last_at, *[0.0] * (len(output.token_ids) - 1)]
        self.last_at = now
        self.num_rounds += 1
        self.num_drafts += output.num_draft_tokens


def make_cases(target: Roofline, draft: PlannedModel, draft_gpus: GpuGroup, acceptance: float) -> list[Case]:
    alone = Option(PLAIN, target, target_dollars_per_hour=target.gpus.dollars_per_hour)
    own, beside = Roofline(draft, draft_gpus), Roofline(draft, target.gpus)

    def option(name: str, drafting: Drafting, dollars: float | None) -> Option:
        return Option(name, target, drafting, alone.target_dollars_per_hour, dollars)

    cases = [Case(alone, None), Case(option(BESIDE, Drafting(beside, acceptance), None), beside)]
    for ms in ROUND_TRIPS_MS:
        drafting = Drafting(own, acceptance, ms / 1e3, RUN_AHEAD_HIDES)
        cases.append(Case(option(f"pool, {ms:g} ms away", drafting, draft_gpus.dollars_per_hour), own, ms))
    return cases
