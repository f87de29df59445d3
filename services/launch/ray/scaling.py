"""Changes the number of workers at run time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.serve._private.common import DeploymentID
from ray.util.metrics import Gauge

from cluster.config import Config
from cluster.placement.registry import Announcement
from cluster.placement.scaling import Decision, ScaledPool, Scaler
from services.launch.ray.options import replicas_within_bounds

logger = logging.getLogger("ray.serve.outrider")

_CALL_SECONDS = 3.0
_INTERVAL_SECONDS = 5.0  # between two decisions
_POOL = ("application", "pool")


def scale(config: Config, pool: ScaledPool, num_replicas: int) -> int:
    """Sets the number of workers, within `min_replicas` and `max_replicas` of the pool. Returns the number.

    Does the same as Serve's scaling API (`POST /api/v1/applications/NAME/deployments/POOL/scale`), without its
    dashboard. The application must have been deployed with `external_scaler_enabled`, as the launcher does.
    """
    wanted = replicas_within_bounds(config, pool, num_replicas)
    ray.get(_send_number(config.ray.application, pool, wanted))
    return wanted


class Autoscaler:
    """Decides, logs the decisions, and lets Serve apply them if configured. For one event loop."""

    def __init__(self, application: str) -> None:
        self.decisions: Sequence[Decision] = ()
        self._application = application
        self._config: Config | None = None
        self._scaler: Scaler | None = None
        self._decide_at = 0.0
        self._said: dict[str, tuple[int, int]] = {}
        self._problem: str | None = None
        self._replicas = Gauge("outrider_scaling_replicas", "Serving workers.", _POOL)
        self._wanted = Gauge("outrider_scaling_wanted_replicas", "Workers that the policy currently wants.", _POOL)
        self._settled = Gauge(
            "outrider_scaling_settled_replicas", "Workers that the policy has wanted for the configured delay.", _POOL
        )
        self._input = Gauge("outrider_scaling_input", "Measurements on which the policy decides.", (*_POOL, "input"))

    def configure(self, config: Config) -> None:
        """Applies `config`; resets the scaling delays if it changed."""
        if config != self._config:
            self._config = config
            self._scaler = Scaler(config) if config.ray.scaling.mode != "manual" else None
            self.decisions = ()

    async def look(self, targets: Sequence[Announcement], drafts: Sequence[Announcement], now: float) -> None:
        """Decides, if a decision is due."""
        if self._scaler is None or self._config is None or now < self._decide_at:
            return
        scaling = self._config.ray.scaling
        self._decide_at = now + _INTERVAL_SECONDS
        self.decisions = self._scaler.decide(targets, drafts, now)
        for decision in self.decisions:
            self._publish(decision)
            if scaling.mode == "act" and decision.settled != decision.current:
                await self._carry_out(decision, self._scaler, self._config)

    def _publish(self, decision: Decision) -> None:
        tags = {"application": self._application, "pool": decision.pool}
        self._replicas.set(decision.current, tags)
        self._wanted.set(decision.wanted, tags)
        self._settled.set(decision.settled, tags)
        for name, value in decision.inputs.items():
            self._input.set(value, tags | {"input": name})
        if self._said.get(decision.pool) != (said := (decision.current, decision.settled)):
            self._said[decision.pool] = said
            logger.info("%s", sentence(decision))

    async def _carry_out(self, decision: Decision, scaler: Scaler, config: Config) -> None:
        further = config.num_further_drafts if decision.pool == "draft" else 0
        try:
            answer = _send_number(self._application, decision.pool, decision.settled - further)
            await asyncio.wait_for(answer, _CALL_SECONDS)
            scaler.asked(decision.pool, decision.settled)
            problem = None
        except (TimeoutError, ray.exceptions.RayError, ValueError) as error:
            cause = getattr(error, "cause", error)
            problem = f"cannot scale: {(str(cause).splitlines() or [type(cause).__name__])[0]}"
        if problem not in (None, self._problem):
            logger.error("%s", problem)
        self._problem = problem


def sentence(decision: Decision) -> str:
    """Returns `decision` as a sentence for the log."""
    change = "stays" if decision.settled == decision.current else f"should be {decision.settled}"
    return f"scaling: {decision.pool} {decision.current}, {change}: {decision.reason}"


def _send_number(application: str, pool: ScaledPool, num_replicas: int) -> Any:
    """Sends the number to Serve's controller. Returns the answer to wait for."""
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    deployment = DeploymentID(name=pool, app_name=application)
    return controller.update_deployment_replicas.remote(deployment, num_replicas)
