"""A RayService to apply without Helm: `make docs` (`python -m deploy.kuberay.rayservice`) writes rayservice.yaml.

It is what the chart renders from values.yaml beside it, less the labels by which Helm knows what is its own.
A test compares the file with what would be written.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from deploy.helm.render import join, render

FOLDER = Path(__file__).resolve().parent
VALUES = FOLDER / "values.yaml"
MANIFEST = FOLDER / "rayservice.yaml"
_HEADER = """\
# Outrider as a RayService, for KubeRay 1.5.1 and later: kubectl apply --namespace serving -f rayservice.yaml
#
# Made by `make docs` from values.yaml beside it and the chart in deploy/helm; do not edit it there, or copy it and do.
# It has not run on a cluster. To change for yours:
# - the images: `ray-vllm-cuda` is deploy/docker/vllm-cuda.Dockerfile with --build-arg EXTRAS=ray, in your registry
# - the models and their settings, in `args` of serveConfigV2 (docs/CONFIGURATION.md)
# - the groups of nodes: nodeSelector, GPUs, memory, limits of the autoscaler
# - the volume for models, which pods of several nodes mount: storageClassName, size
# - the secrets that are expected: outrider-keys and outrider-admins (key `keys`: of clients and of operators), hf-token
#   (key `token`), outrider-redis (key `password`); the Redis, at redis:6379
# - gatewayClassName: upgrades in steps need the Gateway API, a controller for it, and the operator's feature gate
#   RayServiceIncrementalUpgrade. Without them: `upgradeStrategy: {type: NewCluster}`, and no clusterUpgradeOptions
# - the operator's labels in the NetworkPolicy, if yours are others; clients are not limited there
"""


def make_manifest() -> str:
    objects = render(yaml.safe_load(VALUES.read_text(encoding="utf-8")), name="outrider")
    of_helm = re.compile(r"^ *(app\.kubernetes\.io/managed-by|helm\.sh/chart): .*\n", re.MULTILINE)
    return _HEADER + of_helm.sub("", join(objects))


if __name__ == "__main__":
    MANIFEST.write_text(make_manifest(), encoding="utf-8")
