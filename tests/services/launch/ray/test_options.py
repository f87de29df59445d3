"""Tests of the deployment options of each pool, and of the settings that are refused before anything starts."""

from __future__ import annotations

import pytest

from cluster.config.file import load_config
from cluster.errors import ConfigurationError
from services.launch.ray.options import (
    DeploymentOptions,
    config_of_deployment,
    deployment_options,
    host_cpu_threads,
    pool_of,
    replicas_within_bounds,
    sidecar_options,
)


def pools(*overrides: str) -> dict[str, DeploymentOptions]:
    return {options.name: options for options in deployment_options(load_config(None, overrides))}


def test_the_default_fits_into_two_cores_and_needs_no_gpu() -> None:
    options = [pool.ray_actor_options for pool in pools().values()]
    assert sum(pool["num_cpus"] for pool in options) == 2
    assert all(pool["num_gpus"] == 0 for pool in options)


def test_a_tensor_parallel_target_takes_all_its_gpus_in_one_replica() -> None:
    target = pools("target.engine=vllm", "target.tensor_parallel_size=4", "ray.target.accelerator_type=A100")["target"]
    assert target.ray_actor_options["num_gpus"] == 4
    assert target.ray_actor_options["accelerator_type"] == "A100"


def test_resources_and_labels_reach_serve() -> None:
    draft = pools("ray.draft.resources={A10G: 1}", "ray.draft.label_selector={zone: b}", "draft.replicas=3")["draft"]
    assert draft.ray_actor_options["resources"] == {"A10G": 1}
    assert draft.ray_actor_options["label_selector"] == {"zone": "b"}
    assert draft.keywords()["num_replicas"] == 3
    assert draft.keywords()["name"] == "draft"


def test_serve_waits_as_long_as_programs_drain() -> None:
    options = pools("target.drain_seconds=300", "router.drain_seconds=100")
    assert options["target"].graceful_shutdown_timeout_s > 300
    assert options["router"].graceful_shutdown_timeout_s > 200


def test_routers_with_a_fixed_port_are_on_different_nodes() -> None:
    assert pools("ray.router.replicas=2")["router"].max_replicas_per_node == 1
    assert pools("ray.router.replicas=2", "router.port=0")["router"].max_replicas_per_node is None


@pytest.mark.parametrize(("wanted", "allowed"), [(0, 1), (1, 1), (3, 3), (9, 4)])
def test_drafts_stay_within_their_bounds(wanted: int, allowed: int) -> None:
    assert replicas_within_bounds(load_config(None, ["ray.draft.max_replicas=4"]), "draft", wanted) == allowed


def test_sidecars_are_in_their_targets_placement_group() -> None:
    draft = (
        "draft.placement=sidecar",
        "draft.replicas=2",
        "ray.draft={accelerator_type: A10G, label_selector: {gen: '2'}}",
    )
    options = pools("ray.target={resources: {slot: 1}, num_gpus: 4, num_cpus: 8}", *draft)
    assert options.keys() == {"router", "target"}
    beside = {"CPU": 0.5, "GPU": 1, "accelerator_type:A10G": 0.001}
    assert options["target"].placement_group_bundles == [{"CPU": 8, "GPU": 4, "slot": 1}, beside, beside]
    assert options["target"].placement_group_strategy == "STRICT_PACK"
    assert options["target"].placement_group_bundle_label_selector == [{}, {"gen": "2"}, {"gen": "2"}]
    assert options["target"].graceful_shutdown_timeout_s > pools()["target"].graceful_shutdown_timeout_s


@pytest.mark.parametrize(
    ("settings", "num_cpus", "threads"),
    [
        (["ray.draft.num_cpus=12"], 12, 12),
        (["draft.threads=8"], 8, 8),
        (["ray.draft.num_cpus=12", "draft.threads=8"], 12, 8),
        (["draft.cpus=[4,5,6]"], 3, 3),
    ],
)
def test_a_draft_on_its_targets_host_takes_cores_of_the_targets_group(
    settings: list[str], num_cpus: int, threads: int
) -> None:
    settings = ["draft.placement=host-cpu", "ray.target={num_gpus: 1, num_cpus: 4}", *settings]
    assert pools(*settings)["target"].placement_group_bundles == [{"CPU": 4, "GPU": 1}, {"CPU": num_cpus}]
    config = load_config(None, settings)
    assert sidecar_options(config)["num_cpus"] == num_cpus
    assert host_cpu_threads(config) == threads


def test_further_drafts_are_deployments_of_their_own_with_other_settings() -> None:
    zone_b = "replicas: 2, label_selector: {zone: b}, draft: {drafter: ngram, max_num_seqs: 6}"
    further = f"ray.further_drafts={{zone-b: {{{zone_b}}}}}"
    config = load_config(None, ["draft.max_num_seqs=9", further])
    options = {options.name: options for options in deployment_options(config)}
    assert options.keys() == {"router", "target", "draft", "draft-zone-b"}
    assert options["draft-zone-b"].num_replicas == 2
    assert options["draft-zone-b"].ray_actor_options["label_selector"] == {"zone": "b"}
    assert [pool_of(name) for name in options] == ["router", "target", "draft", "draft"]
    own = config_of_deployment(config, "draft-zone-b").draft
    assert (own.drafter, own.max_num_seqs) == ("ngram", 6)
    assert config_of_deployment(config, "draft") == config


@pytest.mark.parametrize("override", ["speculation.num_speculative_tokens=0", "draft.replicas=0"])
def test_without_speculation_there_is_no_draft_pool(override: str) -> None:
    assert list(pools(override)) == ["router", "target"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["simulation.round_trip_ms=5"], ["simulation.round_trip_ms", "--launcher local"]),
        (
            ["target.engine=vllm", "target.engine_args={distributed_executor_backend: ray}"],
            ["target.engine_args", "one node"],
        ),
        (
            ["target.engine=vllm", "target.tensor_parallel_size=4", "ray.target.num_gpus=2"],
            ["ray.target.num_gpus 2", "target.tensor_parallel_size 4"],
        ),
        (["draft.placement=host-cpu"], ["ray.draft.num_cpus is 0.5", "such as 16"]),
        (
            ["draft.placement=host-cpu", "ray.draft={num_cpus: 16, accelerator_type: L4}"],
            ["needs no GPU", "ray.draft.accelerator_type"],
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], said: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        pools(*overrides)
    assert all(part in caught.value.message for part in said)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("ray.draft={max_replicas: 1, min_replicas: 2}", "ray.draft.max_replicas 1"),
        ("ray.draft.max_replicas=0", "ray.draft.max_replicas"),
        ("ray.scaling.mode=act", "ray.target.max_replicas"),
        ("ray.further_drafts={b: {draft: {modle: x}}}", "modle"),
        ("ray.drafts.num_gpus=1", "unknown key 'ray.drafts'"),
        ("ray.draft.num_gpu=1", "'num_gpus'"),
    ],
)
def test_a_bad_setting_is_named(override: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        load_config(None, [override])
