"""Which cores a draft on its target's host gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.config import Config
from cluster.config.file import load_config
from cluster.errors import ConfigurationError
from services.launch.cores import CoreShares
from services.launch.host_cores import (
    MAX_DRAFT_CORES,
    Core,
    choose_cores,
    num_target_cores,
    parse_cpu_list,
    read_cores,
    read_quota,
    share_host_cores,
)

TWO_NODES = [Core((cpu, cpu + 64), node=cpu // 32) for cpu in range(64)]  # siblings as Linux numbers them


def config_of(*settings: str) -> Config:
    return load_config(None, ["draft.placement=host-cpu", *settings])


def shares(cores: list[Core], *settings: str, target_has_gpu: bool = True) -> CoreShares:
    return share_host_cores(config_of(*settings), cores, target_has_gpu=target_has_gpu)


def flat(num_cores: int) -> list[Core]:
    return [Core((cpu,)) for cpu in range(num_cores)]


def test_a_target_keeps_two_cores_and_one_for_each_gpu_and_the_router_one() -> None:
    assert num_target_cores(config_of()) == 2 + 1 + 1
    vllm = ("target.engine=vllm", "target.tensor_parallel_size=4", "target.replicas=2")
    assert num_target_cores(config_of(*vllm)) == 2 * (2 + 4) + 1


@pytest.mark.parametrize(
    ("num_cores", "settings", "draft"),
    [
        (5, [], (4,)),
        (12, [], tuple(range(4, 12))),
        (12, ["draft.threads=3"], (9, 10, 11)),
        (64, [], tuple(range(64 - MAX_DRAFT_CORES, 64))),
        (64, ["draft.threads=20"], tuple(range(44, 64))),
        (12, ["draft.cpus=[2,3]"], (2, 3)),
    ],
)
def test_target_and_draft_share_no_core(num_cores: int, settings: list[str], draft: tuple[int, ...]) -> None:
    found = shares(flat(num_cores), *settings)
    assert found.drafts == (draft,)
    assert found.targets == (tuple(cpu for cpu in range(num_cores) if cpu not in draft),)
    assert not found.drafts_share


def test_a_draft_has_whole_cores_of_one_node() -> None:
    found = shares(TWO_NODES, "target.replicas=2", "draft.replicas=2")
    assert found.drafts == (tuple(range(48, 64)), tuple(range(16, 32)))
    assert found.targets == ((*range(16), *range(32, 48), *range(64, 80), *range(96, 112)),) * 2


def test_a_draft_has_fewer_cores_where_no_node_has_more() -> None:
    cores = [Core((cpu,), node=cpu // 4) for cpu in range(16)]
    assert choose_cores(cores, num_drafts=2, num_cores=6) == ((12, 13, 14, 15), (8, 9, 10, 11))


def test_cores_of_a_pinned_target_are_its_own_and_all_others_are_free() -> None:
    assert shares(flat(2), "target.cpus=[0]", target_has_gpu=False).drafts == ((1,),)
    assert shares(TWO_NODES, "target.cpus=[48,80]").drafts == ((47, *range(49, 64)),)


@pytest.mark.parametrize(
    ("num_cores", "settings", "target_has_gpu", "said"),
    [
        (4, [], True, r"0 of 4 cores are free, and each of 1 draft workers needs a core \(1 x .* kept, 4 in all"),
        (0, [], True, "0 of 0 cores are free"),
        (8, ["draft.replicas=5"], True, "4 of 8 cores are free, and each of 5 draft workers needs a core"),
        (12, ["draft.threads=9"], True, "8 of 12 cores are free, .* needs draft.threads 9 cores of one NUMA node"),
        (2, ["target.cpus=[0,1]"], False, "0 of 2 cores are free, .*target.cpus has the others"),
        (2, ["draft.cpus=[0,1]"], True, "draft.cpus leaves the target no core"),
        (64, [], False, "takes all cores: set target.cpus"),
    ],
)
def test_with_too_few_free_cores_the_error_says_what_to_do(
    num_cores: int, settings: list[str], target_has_gpu: bool, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        shares(flat(num_cores), *settings, target_has_gpu=target_has_gpu)


def test_cores_are_read_with_their_nodes_as_far_as_the_process_may_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 5, 6})
    for node, cpus in (("node0", "0-1,4-5"), ("node1", "2-3,6-7")):
        (tmp_path / "node" / node).mkdir(parents=True)
        (tmp_path / "node" / node / "cpulist").write_text(f"{cpus}\n")
    for cpu in range(8):
        topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert read_cores(tmp_path) == (Core((1, 5), 0), Core((2, 6), 1), Core((3,), 1))


def test_without_a_topology_every_cpu_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    assert read_cores(tmp_path) == (Core((0,)), Core((3,)))


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("250000 100000", 2), ("50000 100000", 1), (None, None)]
)
def test_a_cgroup_bounds_the_cores(tmp_path: Path, text: str | None, quota: int | None) -> None:
    own = tmp_path / "own"
    own.write_text("1:cpu:/\n0::/pod/container\n")
    (tmp_path / "pod" / "container").mkdir(parents=True)
    if text is not None:
        (tmp_path / "pod" / "container" / "cpu.max").write_text(f"{text}\n")
    assert read_quota(own, tmp_path) == quota


def test_the_kernels_lists_of_cpus() -> None:
    assert list(parse_cpu_list("0-2,8\n")) == [0, 1, 2, 8]
    assert list(parse_cpu_list("\n")) == []
