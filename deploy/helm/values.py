"""The values of the Helm chart, as declarations: `make docs` writes deploy/helm/outrider/values.schema.json from them.

The schema lets `helm` refuse a wrong key or type by its name, in the configuration tree too. A test compares the file
with what would be written, and the defaults of values.yaml with those here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from cluster.config import Config

CHART = Path(__file__).resolve().parent / "outrider"
SCHEMA = CHART / "values.schema.json"

_Port = Annotated[int, Field(gt=0, lt=65536)]
_Percent = Annotated[int, Field(gt=0, le=100)]
_Bytes = Annotated[str, Field(pattern=r"^([0-9]+(\.[0-9]+)?([KMGTP]i?|[kE])?)?$")]  # Kubernetes' format
_Free = dict[str, Any]  # Kubernetes' own structure, which Kubernetes validates
_Quantities = dict[str, str | int | float]


class _Values(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Resources(_Values):
    requests: _Quantities = {}
    limits: _Quantities = {}


class Placement(_Values):
    resources: Resources = Resources()
    nodeSelector: dict[str, str] = {}
    tolerations: list[_Free] = []


class Image(_Values):
    repository: str = "outrider"
    tag: str = ""
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    digests: dict[str, Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]] = {}


class RouterService(_Values):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: _Port = 80
    annotations: dict[str, str] = {}


class RouterAutoscaling(_Values):
    enabled: bool = False
    minReplicas: PositiveInt = 2
    maxReplicas: PositiveInt = 8
    targetCPUUtilizationPercentage: PositiveInt = 70


class Router(Placement):
    replicas: PositiveInt = 2
    image: str = "cpu"
    resources: Resources = Resources(requests={"cpu": "1", "memory": "2Gi"}, limits={"memory": "4Gi"})
    service: RouterService = RouterService()
    autoscaling: RouterAutoscaling = RouterAutoscaling()
    apiKeysSecret: str = ""
    open: bool = False
    adminKeysSecret: str = ""
    tlsSecret: str = ""
    tlsServerName: str = ""


class WorkerValues(Placement):
    image: str = "cpu"
    gpus: NonNegativeInt = 0
    gpuResource: str = "nvidia.com/gpu"


class PoolAutoscaling(_Values):
    enabled: bool = False
    minReplicas: PositiveInt = 1
    maxReplicas: PositiveInt = 8
    metric: str = ""
    targetAverageValue: str = "1"


class TargetValues(WorkerValues):
    resources: Resources = Resources(requests={"cpu": "4", "memory": "8Gi"}, limits={"memory": "16Gi"})
    nodesPerReplica: PositiveInt = 1
    rayTokenSecret: str = ""
    startupSeconds: PositiveInt = 1800
    shmSize: _Bytes = "8Gi"
    autoscaling: PoolAutoscaling = PoolAutoscaling()


class DraftValues(WorkerValues):
    resources: Resources = Resources(requests={"cpu": "2", "memory": "4Gi"}, limits={"memory": "8Gi"})
    startupSeconds: PositiveInt = 900
    near: Literal["topology.kubernetes.io/zone", "kubernetes.io/hostname", ""] = "topology.kubernetes.io/zone"
    autoscaling: PoolAutoscaling = PoolAutoscaling()


class ModelCache(_Values):
    claim: str = ""
    size: _Bytes = ""
    storageClass: str = ""
    accessModes: list[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"]] = ["ReadWriteMany"]
    emptyDirSize: _Bytes = "500Gi"


class Tls(_Values):
    secretName: str = ""
    serverName: str = ""
    tokenSecret: str = ""


class PodDisruptionBudget(_Values):
    enabled: bool = True
    maxUnavailable: PositiveInt | Annotated[str, Field(pattern=r"^\d+%$")] = 1


class NetworkPolicy(_Values):
    enabled: bool = True
    clients: list[_Free] = []
    monitoring: list[_Free] = [{"namespaceSelector": {}}]
    egress: list[_Free] = [{"ports": [{"port": 443, "protocol": "TCP"}]}]


class EndpointPicker(_Values):
    name: str = ""
    port: Annotated[int, Field(ge=1, le=65535)] = 9002
    failureMode: Literal["FailOpen", "FailClose"] = "FailOpen"


class Gateway(_Values):
    enabled: bool = False
    parentRefs: list[_Free] = []
    hostnames: list[str] = []
    endpointPicker: EndpointPicker = EndpointPicker()


class PodMonitor(_Values):
    enabled: bool = False
    interval: str = "15s"
    labels: dict[str, str] = {}


class PrometheusRules(_Values):
    enabled: bool = False
    labels: dict[str, str] = {}


class Dashboards(_Values):
    enabled: bool = False
    labels: dict[str, str] = {"grafana_dashboard": "1"}
    annotations: dict[str, str] = {}


class Grafana(_Values):
    dashboards: Dashboards = Dashboards()


class RayHead(_Values):
    resources: Resources = Resources(requests={"cpu": "2", "memory": "8Gi"}, limits={"memory": "8Gi"})


class RayWorkers(Placement):
    name: Annotated[str, Field(pattern="^[a-z]([-a-z0-9]*[a-z0-9])?$")]
    replicas: NonNegativeInt = 1
    shmSize: _Bytes = "8Gi"
    minReplicas: NonNegativeInt | None = None
    maxReplicas: PositiveInt | None = None
    labels: dict[str, str] = {}
    gpus: NonNegativeInt = 0
    gpuResource: str = "nvidia.com/gpu"


class RayAutoscaling(_Values):
    enabled: bool = False
    idleTimeoutSeconds: PositiveInt = 60
    resources: Resources = Resources(requests={"cpu": "500m", "memory": "512Mi"}, limits={"memory": "512Mi"})


class RayUpgrade(_Values):
    strategy: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"] = "NewCluster"
    gatewayClassName: str = ""
    maxSurgePercent: _Percent = 25
    stepSizePercent: _Percent = 5
    intervalSeconds: PositiveInt = 30


class Redis(_Values):
    address: str = ""
    passwordSecret: str = ""


class Ray(_Values):
    version: str = "2.60.0"
    image: str = "ray"
    operator: list[_Free] = [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    ]
    head: RayHead = RayHead()
    workerGroups: list[RayWorkers] = [
        RayWorkers(
            name="targets",
            resources=Resources(requests={"cpu": "4", "memory": "16Gi"}, limits={"memory": "16Gi"}),
        )
    ]
    autoscaling: RayAutoscaling = RayAutoscaling()
    upgrade: RayUpgrade = RayUpgrade()
    redis: Redis = Redis()


class Values(_Values):
    mode: Literal["plain", "ray"] = "plain"
    image: Image = Image()
    imagePullSecrets: list[_Free] = []
    config: Config = Config()
    router: Router = Router()
    target: TargetValues = TargetValues()
    draft: DraftValues = DraftValues()
    modelCache: ModelCache = ModelCache()
    tmpSize: _Bytes = "20Gi"
    huggingFaceSecret: str = ""
    tls: Tls = Tls()
    metricsTokenSecret: str = ""
    podDisruptionBudget: PodDisruptionBudget = PodDisruptionBudget()
    networkPolicy: NetworkPolicy = NetworkPolicy()
    gateway: Gateway = Gateway()
    podMonitor: PodMonitor = PodMonitor()
    prometheusRules: PrometheusRules = PrometheusRules()
    grafana: Grafana = Grafana()
    ray: Ray = Ray()


def make_schema() -> str:
    schema = Values.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    # Helm passes a parent chart's globals on, even to charts without any.
    schema["properties"]["global"] = {"type": "object"}
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(make_schema(), encoding="utf-8")
