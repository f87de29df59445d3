"""The sections `ray` and `placement` of the configuration: where programs run, and how they hear of each other."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from cluster.config.types import NotNegative, Port, Section

TRIAL_SHARE = 0.02

_Resources = dict[str, Annotated[float, Field(gt=0)]]


class RayPoolConfig(Section):
    """Resources that Ray sets aside for each replica of a pool, on one node, and the nodes it may use."""

    num_cpus: NotNegative = Field(
        1.0,
        description="cores that Ray sets aside for a replica; what it computes on is for `threads` and `cpus` to say",
    )
    num_gpus: NotNegative | None = Field(
        None,
        description="GPUs of a replica, all on one node; null: tensor_parallel_size where `device` is cuda or an "
        "accelerator_type is named, else none",
    )
    accelerator_type: str | None = Field(None, description="the GPU, by Ray's name for it, such as `A100` or `A10G`")
    resources: _Resources = Field({}, description="custom resources that a replica takes of its node, by name")
    label_selector: dict[str, str] = Field(
        {}, description="labels that the node must have, as Ray's selectors say it: `{zone: a}`, `{zone: '!a'}`"
    )


class RayRouterConfig(RayPoolConfig):
    num_cpus: NotNegative = Field(0.5, description="cores that Ray sets aside for a replica")
    replicas: PositiveInt = Field(
        1, description="routers; more than one on a node need `router.port` 0, else there is one on a node at most"
    )


class RayTargetConfig(RayPoolConfig):
    min_replicas: PositiveInt = Field(1, description="fewer target workers are not scaled to")
    max_replicas: PositiveInt | None = Field(None, description="more target workers are not scaled to; null: no limit")


class RayDraftConfig(RayPoolConfig):
    num_cpus: NotNegative = Field(0.5, description="cores that Ray sets aside for a replica")
    min_replicas: Annotated[int, Field(ge=0)] = Field(1, description="fewer draft workers are not scaled to")
    max_replicas: PositiveInt | None = Field(None, description="more draft workers are not scaled to; null: no limit")


class RayFurtherDraftsConfig(RayPoolConfig):
    """Draft workers in addition to those of `draft.replicas`, such as those of another zone, or with another model."""

    num_cpus: NotNegative = Field(0.5, description="cores that Ray sets aside for a replica")
    replicas: PositiveInt = Field(1, description="how many; they are not scaled")
    draft: dict[str, Any] = Field({}, description="settings of the section `draft` that are others for these")


class RayScalingConfig(Section):
    """Scaling of the target pool and of the draft pool, by one policy."""

    mode: Literal["manual", "advise", "act"] = Field(
        "manual",
        description="manual: nothing; advise: decisions are logged and are metrics, and nothing else; act: Serve "
        "carries them out, within the `min_replicas` and `max_replicas` of both pools",
    )
    interval_seconds: Annotated[float, Field(gt=0)] = Field(5.0, description="how often the policy looks")
    target_use: Annotated[float, Field(gt=0, le=1)] = Field(
        0.8,
        description="how full targets should be: of KV blocks or of `target.max_num_seqs`, whichever is fuller",
    )
    queued_tokens: PositiveInt = Field(4096, description="number of waiting tokens for which a target is added")
    draft_gain: Annotated[float, Field(gt=0)] = Field(
        0.05,
        description="what a draft worker must bring by the targets' own measures, in tokens a second of one target "
        "without drafts: about its cost relative to a target's. One that brings less than half of that is taken away",
    )
    upscale_delay_seconds: NotNegative = Field(15.0, description="how long more must have been wanted")
    downscale_delay_seconds: NotNegative = Field(120.0, description="how long fewer must have been wanted")


class RayConfig(Section):
    application: Annotated[str, Field(min_length=1)] = Field(
        "outrider", description="name of the Serve application under `outrider serve --launcher ray`"
    )
    address: str | None = Field(
        None,
        description="the Ray cluster to run on, `host:port` of its head; null: the one that runs on this machine, else "
        "a new one, which ends with the launcher",
    )
    proxy_port: Port | None = Field(
        None,
        description="port of Serve's own HTTP proxy, which passes requests on to the routers, under `outrider serve`; "
        "null: no proxy, clients call the routers",
    )
    router: RayRouterConfig = Field(RayRouterConfig(), description="Each router.")
    target: RayTargetConfig = Field(RayTargetConfig(), description="Each target worker.")
    draft: RayDraftConfig = Field(RayDraftConfig(), description="Each draft worker.")
    further_drafts: dict[Annotated[str, Field(pattern="^[a-z0-9-]+$")], RayFurtherDraftsConfig] = Field(
        {},
        description="further draft workers by a name of your own, each with the settings of `ray.draft` but for its "
        "bounds, `replicas`, and `draft`, what differs in that section: `{zone-b: {replicas: 2, label_selector: {zone: "
        "b}}, bigger: {accelerator_type: L4, draft: {model: ..., quantization: int4}}}`",
    )
    scaling: RayScalingConfig = Field(RayScalingConfig(), description="How many of both there are.")


class PlacementConfig(Section):
    host: str | None = Field(
        None,
        description="the host that this program runs on, as the lists of workers name hosts (`host=h2` after an "
        "address); null: the environment's `OUTRIDER_HOST`, which a launcher may set, or not known",
    )
    zone: str | None = Field(None, description="its zone, likewise; null: `OUTRIDER_ZONE`")
    region: str | None = Field(None, description="its region, likewise; null: `OUTRIDER_REGION`")
    trial_share: Annotated[float, Field(ge=0, le=0.5)] = Field(
        TRIAL_SHARE,
        description="share of a target's sequences that draft models other than the best get where a pool has several, "
        "so that they keep being measured; it changes no token",
    )
    host_label: str = Field("ray.io/node-id", description="the label of a Ray node that says which host it is")
    zone_label: str = Field("ray.io/availability-zone", description="the label that says its zone")
    region_label: str = Field("ray.io/availability-region", description="the label that says its region")
    heartbeat_seconds: Annotated[float, Field(gt=0)] = Field(
        1.0, description="how often a worker tells the registry that it is there"
    )
    expiry_seconds: Annotated[float, Field(gt=0)] = Field(
        6.0, description="how long the registry lists a worker that it does not hear of"
    )
    settling_seconds: NotNegative = Field(
        6.0, description="how long a new registry's lists only add to those that callers have"
    )

    @model_validator(mode="after")
    def _outlasts_a_heartbeat(self) -> PlacementConfig:
        if self.expiry_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"expiry_seconds {self.expiry_seconds} must be at least twice heartbeat_seconds, "
                f"{self.heartbeat_seconds}"
            )
        return self
