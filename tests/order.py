"""Which tests stay together in one process, and in which order processes take them: see `make test`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadScopeScheduling

# Files of tests that share a cluster, with about how many seconds they take while two other processes run tests.
# A file that is not here is a group of its own.
_TOGETHER: dict[str, tuple[float, tuple[str, ...]]] = {
    "Ray's nodes": (
        250.0,
        ("ray/test_faults.py", "ray/test_scaling.py", "ray/test_upgrade.py", "ray/test_versions.py"),
    ),
    "vLLM": (
        300.0,
        (
            "vllm/test_exactness.py",
            "vllm/test_load_generator.py",
            "vllm/test_observation.py",
            "vllm/test_owners.py",
            "vllm/test_shaped_answers.py",
            "vllm/test_tracing.py",
            "vllm/test_wrong_drafts.py",
        ),
    ),
    "the instruct model": (120.0, ("clients/",)),
    "two of each": (140.0, ("test_affinity.py", "test_failover.py", "test_faults.py", "test_several_targets.py")),
}
_SECONDS = {
    "tests/system/vllm/test_engines.py": 100.0,
    "tests/system/vllm/test_architectures.py": 120.0,
    "tests/system/ray/test_launcher.py": 90.0,
    "tests/bench/test_faults.py": 140.0,
    "tests/system/test_terminal.py": 60.0,
    "tests/system/test_fuzz.py": 80.0,
    "tests/system/test_hostile_requests.py": 80.0,
    "tests/system/test_shaped_answers.py": 70.0,
    "tests/system/test_exactness.py": 60.0,
    "tests/system/test_prove.py": 60.0,
    "tests/system/test_tracing.py": 60.0,
    "tests/system/test_draft_versions.py": 75.0,
    "tests/system/test_wheel.py": 50.0,
    "tests/system/test_usability.py": 50.0,
}
_SECONDS_OF_A_CLUSTER = 30.0  # where none are given above
_SYSTEM = "tests/system/"
_WHOLE_CLUSTERS = (_SYSTEM, "tests/bench/test_faults.py")


def group_of(file: str) -> str:
    """The group of the tests in `file`, a path from the project's root."""
    if file.startswith(_SYSTEM):
        for name, (_, files) in _TOGETHER.items():
            if file.removeprefix(_SYSTEM).startswith(files):
                return name
    return file


class ByGroup(LoadScopeScheduling):
    """Gives a process one group after the other. What xdist has for groups does nothing with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


def _seconds_of(group: str) -> float:
    return _TOGETHER[group][0] if group in _TOGETHER else _SECONDS.get(group, _SECONDS_OF_A_CLUSTER)


def put_in_order(items: list[pytest.Item]) -> None:
    """Sorts `items` by their groups.

    Whole clusters, which wait for half of their time, come the longest first, each followed by as large a share of the
    other tests, which compute, as its own share of the whole clusters' time: so processes that take groups in turn have
    some of both at any time. Items of a group stay in their order.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid.partition("::")[0]), []).append(item)
    is_whole = {group: of_it[0].nodeid.startswith(_WHOLE_CLUSTERS) for group, of_it in groups.items()}
    whole = sorted((group for group in groups if is_whole[group]), key=_seconds_of, reverse=True)
    rest = [group for group in groups if not is_whole[group]]
    begins = _begins(whole, [_seconds_of(group) for group in whole]) | _begins(rest, [1.0] * len(rest))
    items[:] = [item for group in sorted(groups, key=begins.__getitem__) for item in groups[group]]


def _begins(groups: Sequence[str], weights: Sequence[float]) -> dict[str, float]:
    """The share of the weights before each of `groups`."""
    total = sum(weights) or 1.0
    return dict(zip(groups, (before / total for before in itertools.accumulate(weights, initial=0.0)), strict=False))
