"""The fields that the chart uses of custom resources, as their documentation has them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Metadata(_Fields):
    name: str
    labels: dict[str, str]


class _Selector(_Fields):
    matchLabels: dict[str, str]


class _SecretKey(_Fields):
    name: str
    key: str


class _SecretOrConfigMap(_Fields):
    secret: _SecretKey


class _SafeTlsConfig(_Fields):
    ca: _SecretOrConfigMap
    cert: _SecretOrConfigMap | None = None
    keySecret: _SecretKey | None = None
    serverName: str


class _Authorization(_Fields):
    credentials: _SecretKey


class _MetricsEndpoint(_Fields):
    port: str
    path: str
    interval: str
    scheme: Literal["http", "https"] = "http"
    tlsConfig: _SafeTlsConfig | None = None
    authorization: _Authorization | None = None


class _PodMonitorSpec(_Fields):
    selector: _Selector
    podMetricsEndpoints: list[_MetricsEndpoint]


class PodMonitor(_Fields):
    """prometheus-operator.dev/docs/api-reference/api, monitoring.coreos.com/v1."""

    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: _Metadata
    spec: _PodMonitorSpec


class _Rule(_Fields):
    alert: str
    expr: str
    labels: dict[str, str]
    annotations: dict[str, str]
    for_: str = Field("0s", alias="for", pattern=r"^\d+[smh]$")


class _Record(_Fields):
    record: str
    expr: str


class _RuleGroup(_Fields):
    name: str
    rules: list[_Rule | _Record]


class _PrometheusRuleSpec(_Fields):
    groups: list[_RuleGroup]


class PrometheusRule(_Fields):
    """prometheus-operator.dev/docs/api-reference/api, monitoring.coreos.com/v1."""

    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: _Metadata
    spec: _PrometheusRuleSpec


class _PodMetadata(_Fields):
    labels: dict[str, str]
    annotations: dict[str, str] = {}


class _PodTemplate(_Fields):
    metadata: _PodMetadata
    spec: dict[str, Any]  # a PodSpec: checked as Kubernetes' own


class _RollingUpdateConfiguration(_Fields):
    maxUnavailable: int
    maxSurge: int


class _RolloutStrategy(_Fields):
    type: Literal["RollingUpdate"]
    rollingUpdateConfiguration: _RollingUpdateConfiguration


class _LeaderWorkerTemplate(_Fields):
    size: int = Field(ge=1)
    restartPolicy: Literal["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
    leaderTemplate: _PodTemplate
    workerTemplate: _PodTemplate


class _LeaderWorkerSetSpec(_Fields):
    replicas: int
    startupPolicy: Literal["LeaderCreated", "LeaderReady"]
    rolloutStrategy: _RolloutStrategy
    leaderWorkerTemplate: _LeaderWorkerTemplate


class LeaderWorkerSet(_Fields):
    """lws.sigs.k8s.io/docs/reference, leaderworkerset.x-k8s.io/v1."""

    apiVersion: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: _Metadata
    spec: _LeaderWorkerSetSpec


class _HeadGroup(_Fields):
    rayStartParams: dict[str, str]
    template: _PodTemplate


class _WorkerGroup(_HeadGroup):
    groupName: str
    labels: dict[str, str] = {}
    replicas: int
    minReplicas: int
    maxReplicas: int


class _SecretKey(_Fields):
    name: str
    key: str


class _ValueFrom(_Fields):
    secretKeyRef: _SecretKey


class _Password(_Fields):
    valueFrom: _ValueFrom


class _FaultTolerance(_Fields):
    redisAddress: str
    redisPassword: _Password | None = None


class _AuthOptions(_Fields):
    mode: Literal["token", "disabled"]


class _VolumeMount(_Fields):
    name: str
    mountPath: str


class _AutoscalerOptions(_Fields):
    idleTimeoutSeconds: int
    imagePullPolicy: Literal["Always", "IfNotPresent", "Never"]
    resources: dict[Literal["requests", "limits"], dict[str, str | int | float]]
    securityContext: dict[str, Any]
    volumeMounts: list[_VolumeMount]


class _RayCluster(_Fields):
    rayVersion: str
    authOptions: _AuthOptions
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: _AutoscalerOptions | None = None
    gcsFaultToleranceOptions: _FaultTolerance | None = None
    headGroupSpec: _HeadGroup
    workerGroupSpecs: list[_WorkerGroup]


class _UpgradeOptions(_Fields):
    gatewayClassName: str = Field(min_length=1)
    maxSurgePercent: int = Field(ge=0, le=100)
    stepSizePercent: int = Field(ge=0, le=100)
    intervalSeconds: int = Field(gt=0)


class _UpgradeStrategy(_Fields):
    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]
    clusterUpgradeOptions: _UpgradeOptions | None = None


class _RayServiceSpec(_Fields):
    upgradeStrategy: _UpgradeStrategy
    rayClusterDeletionDelaySeconds: int
    serveConfigV2: str
    rayClusterConfig: _RayCluster

    @model_validator(mode="after")
    def _incremental(self) -> _RayServiceSpec:
        """Checks what KubeRay itself refuses at the first reconciliation."""
        is_incremental = self.upgradeStrategy.type == "NewClusterWithIncrementalUpgrade"
        assert is_incremental == (self.upgradeStrategy.clusterUpgradeOptions is not None)
        assert self.rayClusterConfig.enableInTreeAutoscaling or not is_incremental
        return self


class RayService(_Fields):
    """ray-project.github.io/kuberay/reference/api, ray.io/v1."""

    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: _Metadata
    spec: _RayServiceSpec


class _Port(_Fields):
    number: int = Field(ge=1, le=65535)


class _EndpointPickerRef(_Fields):
    name: str = Field(min_length=1)
    port: _Port
    failureMode: Literal["FailOpen", "FailClose"]


class _InferencePoolSpec(_Fields):
    selector: _Selector
    targetPorts: list[_Port] = Field(min_length=1, max_length=8)
    endpointPickerRef: _EndpointPickerRef


class InferencePool(_Fields):
    """gateway-api-inference-extension.sigs.k8s.io/reference/spec, inference.networking.k8s.io/v1."""

    apiVersion: Literal["inference.networking.k8s.io/v1"]
    kind: Literal["InferencePool"]
    metadata: _Metadata
    spec: _InferencePoolSpec


class _ParentRef(_Fields):
    name: str
    namespace: str | None = None
    sectionName: str | None = None


class _BackendRef(_Fields):
    group: str
    kind: str
    name: str


class _Timeouts(_Fields):
    request: str = Field(pattern=r"^\d+(ms|s|m|h)$")


class _RouteRule(_Fields):
    backendRefs: list[_BackendRef]
    timeouts: _Timeouts


class _HttpRouteSpec(_Fields):
    parentRefs: list[_ParentRef] = Field(min_length=1)
    hostnames: list[str] = []
    rules: list[_RouteRule]


class HttpRoute(_Fields):
    """gateway-api.sigs.k8s.io/reference/spec, gateway.networking.k8s.io/v1."""

    apiVersion: Literal["gateway.networking.k8s.io/v1"]
    kind: Literal["HTTPRoute"]
    metadata: _Metadata
    spec: _HttpRouteSpec


CUSTOM: dict[str, type[BaseModel]] = {
    "HTTPRoute": HttpRoute,
    "InferencePool": InferencePool,
    "LeaderWorkerSet": LeaderWorkerSet,
    "PodMonitor": PodMonitor,
    "PrometheusRule": PrometheusRule,
    "RayService": RayService,
}
