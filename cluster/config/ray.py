"""The sections `ray` and `placement` of the configuration: location of programs, and their registry."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from cluster.config.types import NotNegative, Port, Section

TRIAL_SHARE = 0.02

_Resources = dict[str, Annotated[float, Field(gt=0)]]


class RayProgramConfig(Section):
    """Resources that Ray sets aside for each replica of a program, on one node, and the nodes it may use."""

    num_cpus: NotNegative = Field(0.5, description="cores that Ray reserves for a replica")
    resources: _Resources = Field({}, description="custom resources that a replica requests from its node, by name")
    label_selector: dict[str, str] = Field(
        {}, description="labels that the node must have, in the syntax of Ray's selectors: `{zone: a}`, `{zone: '!a'}`"
    )


class RayRouterConfig(RayProgramConfig):
    replicas: PositiveInt = Field(
        1, description="number of routers; with `router.port` 0 a node may run several, otherwise at most one"
    )


class RayPoolConfig(RayProgramConfig):
    num_gpus: NotNegative | None = Field(
        None,
        description="GPUs of a replica, all on one node; null: tensor_parallel_size if `device` is cuda or an "
        "accelerator_type is set, otherwise none",
    )
    accelerator_type: str | None = Field(None, description="Ray's name of the GPU, such as `A100` or `A10G`")


class RayTargetConfig(RayPoolConfig):
    num_cpus: NotNegative = Field(
        1.0,
        description="cores that Ray reserves for a replica; `threads` and `cpus` set the cores it computes on",
    )
    min_replicas: PositiveInt = Field(1, description="minimum number of target workers")
    max_replicas: PositiveInt | None = Field(None, description="maximum number of target workers; null: no limit")


class RayDraftConfig(RayPoolConfig):
    min_replicas: Annotated[int, Field(ge=0)] = Field(1, description="minimum number of draft workers")
    max_replicas: PositiveInt | None = Field(None, description="maximum number of draft workers; null: no limit")


class RayFurtherDraftsConfig(RayPoolConfig):
    """Draft workers in addition to those of `draft.replicas`, such as those of another zone, or with another model."""

    replicas: PositiveInt = Field(1, description="number of replicas; it is not scaled")
    draft: dict[str, Any] = Field({}, description="settings of the section `draft` that differ for these workers")


class RayScalingConfig(Section):
    """Scaling of the target pool and of the draft pool, by one policy."""

    mode: Literal["manual", "advise", "act"] = Field(
        "manual",
        description="manual: no scaling; advise: decisions are only logged and exported as metrics; act: Serve "
        "applies them, within `min_replicas` and `max_replicas` of both pools",
    )
    draft_gain: Annotated[float, Field(gt=0)] = Field(
        0.05,
        description="minimum gain of a draft worker as measured by the targets, relative to the tokens/s of one "
        "target without drafts: about its cost relative to a target's. A worker that gains less than half of it "
        "is removed",
    )
    upscale_delay_seconds: NotNegative = Field(
        15.0, description="seconds for which more workers must be wanted before any is added"
    )
    downscale_delay_seconds: NotNegative = Field(
        120.0, description="seconds for which fewer workers must be wanted before any is removed"
    )


class RayConfig(Section):
    application: Annotated[str, Field(min_length=1)] = Field(
        "outrider", description="name of the Serve application under `outrider serve --launcher ray`"
    )
    address: str | None = Field(
        None,
        description="Ray cluster to run on, as `host:port` of its head; null: the cluster that runs on this "
        "machine, otherwise a new one that ends with the launcher",
    )
    proxy_port: Port | None = Field(
        None,
        description="port of Serve's HTTP proxy, which forwards requests to the routers, under `outrider serve`; "
        "null: no proxy, clients call the routers",
    )
    router: RayRouterConfig = Field(RayRouterConfig(), description="Each router.")
    target: RayTargetConfig = Field(RayTargetConfig(), description="Settings of each target worker.")
    draft: RayDraftConfig = Field(RayDraftConfig(), description="Settings of each draft worker.")
    further_drafts: dict[Annotated[str, Field(pattern="^[a-z0-9-]+$")], RayFurtherDraftsConfig] = Field(
        {},
        description="further draft workers, by a name of your choice: the settings of `ray.draft` without its "
        "bounds, the number of `replicas`, and in `draft` the settings of that section that differ: `{zone-b: "
        "{replicas: 2, label_selector: {zone: b}}, bigger: {accelerator_type: L4, draft: {model: ..., "
        "quantization: int4}}}`",
    )
    scaling: RayScalingConfig = Field(RayScalingConfig(), description="Number of workers in both pools.")


class PlacementConfig(Section):
    host: str | None = Field(
        None,
        description="host of this program, as the lists of workers name hosts (`host=h2` after an address); null: "
        "the environment variable `OUTRIDER_HOST`, which a launcher may set, otherwise unknown",
    )
    zone: str | None = Field(None, description="zone of this program; null: `OUTRIDER_ZONE`")
    region: str | None = Field(None, description="region of this program; null: `OUTRIDER_REGION`")
    trial_share: Annotated[float, Field(ge=0, le=0.5)] = Field(
        TRIAL_SHARE,
        description="share of a target's sequences that other draft models than the best get if a pool has several, "
        "so that all stay measured; it changes no token",
    )
