"""`outrider serve --launcher ray`, in the foreground, and `outrider down`, for leftovers of a killed launcher."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve as ray_serve
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.services import find_bootstrap_address
from ray._private.worker import BaseContext
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from cluster.config import Config
from cluster.errors import ConfigurationError
from cluster.owned_folder import sweep
from services.http_call import API_KEY
from services.launch.foreground import StopSignals, announce, read_health
from services.launch.ray.app import build_configured_app
from services.launch.ray.membership import FOLDERS
from services.launch.ray.registry_actor import end_registry, find_decisions, find_view
from services.launch.ray.scaling import sentence

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_LINKS_SECONDS = 30.0  # time for the programs to find each other once all are up
_END_SECONDS = 20.0  # in addition to the time that programs may drain
_LEFTOVER_SECONDS = 15.0


class RayApplication:
    """The application of `config` on a Ray cluster that this process has joined, or started for itself."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.name = config.ray.application
        self._said: dict[str, str] = {}

    def start(self) -> None:
        """Starts the application. Raises ConfigurationError if a setting cannot work, or its name is taken."""
        build_configured_app(self.config)  # raises the errors of the configuration
        if self._status() is not None:
            raise ConfigurationError(
                f"an application {self.name!r} runs on this Ray cluster already: end it with `outrider down`, or set "
                "ray.application to another name"
            )
        port = self.config.ray.proxy_port
        if port is None:
            ray_serve.start(proxy_location="Disabled")
        else:
            ray_serve.start(proxy_location="EveryNode", http_options={"host": self.config.router.host, "port": port})
        self.update(self.config)

    def update(self, config: Config) -> None:
        """Applies `config` if it has changed: Serve replaces one replica after another. Raises ConfigurationError."""
        self.config = config
        app = build_configured_app(config)
        target = ray_serve.RunTarget(app, name=self.name, route_prefix="/", external_scaler_enabled=True)
        ray_serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def is_running(self) -> bool:
        """Returns True if the application runs. Logs changes. Raises ConfigurationError if it cannot start."""
        status = self._status()
        if status is None:
            return False
        for pool, deployment in status.deployments.items():
            states = ", ".join(
                f"{count} {state.lower()}" for state, count in deployment.replica_states.items() if count
            )
            status_word, reason = deployment.status.value.lower(), _last_line(deployment.message)
            said = f"{pool}: {status_word} ({states or 'no replicas'}) {reason}".strip()
            self._say(pool, said, said)
        if self.config.ray.scaling.mode != "manual":
            for decision in find_decisions(self.name):
                what = f"{decision.current} to {decision.settled}"
                self._say(f"scaling of {decision.pool}", what, sentence(decision))
        if status.status == ApplicationStatus.DEPLOY_FAILED:
            reasons = [_last_line(deployment.message) for deployment in status.deployments.values()]
            raise ConfigurationError(f"cannot start: {'; '.join(filter(None, reasons)) or _last_line(status.message)}")
        return bool(status.status == ApplicationStatus.RUNNING)

    def _say(self, subject: str, what: str, sentence: str) -> None:
        """Logs `what` unless it is the last message."""
        if what != self._said.get(subject):
            self._said[subject] = what
            logger.info("%s", sentence)

    def urls(self) -> list[str]:
        """Returns the routers' URLs."""
        view = find_view(self.name, "router")
        return [] if view is None else [f"{self.config.router.scheme}://{member.address}" for member in view.members]

    def is_joined(self) -> bool:
        """Returns True if every router can use every target, and these have all their links."""
        urls = self.urls()
        return len(urls) == self.config.ray.router.replicas and all(map(self._is_router_joined, urls))

    def _is_router_joined(self, url: str) -> bool:
        """Returns True if the router can use every target.

        If it requires keys and the environment has none, one target is enough, as the router's replica has checked.
        """
        health = read_health(url, os.environ.get(API_KEY), self.config.router.tls_certificate_file)
        if health is None or "targets" not in health:
            return health is not None
        return _has_joined(health["targets"], *self._num_workers)

    @property
    def _num_workers(self) -> tuple[int | None, int | None]:
        """Number of targets, and of draft workers per target; None if the number is scaled."""
        if self.config.ray.scaling.mode == "act":
            return None, None
        num_drafts = self.config.draft.replicas if self.config.has_draft_workers else 0
        return self.config.target.replicas, num_drafts + self.config.num_further_drafts

    def stop(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Drains the programs within their limits, unless `is_hurried`; then ends all of them."""
        if not _serve_runs():
            return
        if self._status() is not None:
            ray_serve.delete(self.name, _blocking=False)
            drain = (
                self.config.router.drain_seconds * 2,
                self.config.target.drain_seconds,
                self.config.draft.drain_seconds,
            )
            deadline = time.monotonic() + max(drain) + _END_SECONDS
            while self._status() is not None and not is_hurried():
                if time.monotonic() > deadline:
                    logger.warning("the application has not ended")
                    break
                time.sleep(_POLL_SECONDS)
        end_registry(self.name)
        if not ray_serve.status().applications:
            ray_serve.shutdown()

    def _status(self) -> ApplicationStatusOverview | None:
        return ray_serve.status().applications.get(self.name) if _serve_runs() else None


def serve(config: Config, opens_page: bool = False) -> int:
    """Runs the application until SIGINT or SIGTERM, then drains it until a second signal. Returns the exit code."""
    started_at = time.monotonic()
    context = _join(config, start=True)
    signals = StopSignals()
    application = RayApplication(config)
    is_announced = False
    running_since: float | None = None
    has_begun = False
    try:
        application.start()
        has_begun = True
        while not signals.count:
            if application.is_running() and not is_announced:
                running_since = running_since or time.monotonic()
                if application.is_joined() or time.monotonic() > running_since + _LINKS_SECONDS:
                    is_announced = True
                    urls = application.urls()
                    shown, seconds = urls or ["http://(see `serve status`)"], time.monotonic() - started_at
                    announce(config, shown, seconds, opens_page=opens_page and bool(urls))
                    print("Ray's own view:", *_status_commands(context), "", sep="\n  ", flush=True)
            time.sleep(_POLL_SECONDS)
        logger.info("stopping after running requests have ended; press Ctrl-C again to stop at once")
    finally:
        if has_begun:
            application.stop(signals.is_hurried)
        ray.shutdown()
        if has_begun:
            _sweep_leftovers(signals.is_hurried)
    return 0


def down(config: Config) -> int:
    """Ends the leftovers of a killed `serve` on the Ray cluster and this machine; returns the exit code."""
    try:
        _join(config, start=False)
    except ConnectionError:
        print("No Ray cluster runs here, so no application to end.")
    else:
        application = RayApplication(config)
        application.stop()
        ray.shutdown()
        print(f"The application {application.name!r} has ended.")
    _sweep_leftovers()
    return 0


def _sweep_leftovers(is_hurried: Callable[[], bool] = lambda: False) -> None:
    """Removes the folders of ended programs; waits a little for programs that end together with Ray's cluster."""
    deadline = time.monotonic() + _LEFTOVER_SECONDS
    while sweep(FOLDERS) and time.monotonic() < deadline and not is_hurried():
        time.sleep(_POLL_SECONDS)


def _join(config: Config, *, start: bool) -> BaseContext:
    """Joins a Ray cluster, or starts one. Raises ConnectionError if there is none and `start` is not set."""
    address = config.ray.address
    if address is None and not start and find_bootstrap_address(None) is None and not os.environ.get("RAY_ADDRESS"):
        raise ConnectionError("no Ray was started on this machine")  # the file is Ray's, written by `ray start`
    try:
        return ray.init(address, namespace="outrider", logging_level=logging.WARNING)
    except ConnectionError as error:
        if not start:
            raise
        raise ConfigurationError(f"cannot reach the Ray cluster at {address}: {error}; see ray.address") from error


def _status_commands(context: BaseContext) -> list[str]:
    """Returns the commands of Ray that show the cluster and its applications, with the environment they need."""
    environment = "RAY_AUTH_MODE=token " if is_token_auth_enabled() else ""
    if environment and (path := os.environ.get("RAY_AUTH_TOKEN_PATH")):
        environment += f"RAY_AUTH_TOKEN_PATH={shlex.quote(path)} "
    commands = [f"{environment}ray status --address {context.address_info['gcs_address']}"]
    if context.dashboard_url:
        commands.append(f"{environment}serve status --address http://{context.dashboard_url}")
    return commands


def _serve_runs() -> bool:
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _has_joined(targets: list[dict[str, Any]], num_targets: int | None, num_drafts: int | None) -> bool:
    return len(targets) == (num_targets or len(targets)) and all(
        target["problem"] is None
        and target["num_draft_links"] == target["num_draft_links_configured"]
        and num_drafts in (None, target["num_draft_links"])
        for target in targets
    )


def _last_line(message: str) -> str:
    """Returns the last line of Serve's `message`, which is the reason: the messages end with a traceback."""
    lines = message.strip().splitlines()
    return lines[-1].strip() if lines else ""
