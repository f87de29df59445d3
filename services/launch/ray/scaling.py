"""How many draft workers there are, changed while all runs. Who decides how many it should be calls `scale_drafts`."""

from __future__ import annotations

import ray
from ray.serve._private.common import DeploymentID

from cluster.config import Config
from services.launch.ray.options import drafts_within_bounds


def scale_drafts(config: Config, num_replicas: int) -> int:
    """Makes it as many, within `ray.draft.min_replicas` and `max_replicas`; returns how many that is.

    As Serve's own scaling API does (`POST /api/v1/applications/NAME/deployments/draft/scale`), without its dashboard.
    The application must have been deployed with `external_scaler_enabled`, as the launcher does.
    """
    wanted = drafts_within_bounds(config, num_replicas)
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    draft = DeploymentID(name="draft", app_name=config.ray.application)
    ray.get(controller.update_deployment_replicas.remote(draft, wanted))
    return wanted
