"""Devices: how they are written, which are chosen, and what a program sees of them."""

from __future__ import annotations

import argparse
import os

import pytest

from cluster.errors import ConfigurationError
from services.prove import devices
from services.prove.devices import Device, choose_devices, parse_device


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", Device("cpu")),
        ("cpu:3", Device("cpu", (3,))),
        ("cpu:8,0-2", Device("cpu", (0, 1, 2, 8))),
        ("cuda", Device("cuda")),
        ("cuda:1", Device("cuda", index=1)),
    ],
)
def test_a_device_is_read(text: str, expected: Device) -> None:
    assert parse_device(text) == expected


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:-1", "cpu:", "cpu:1-", "cpu:x", "cpu:1;2", "cuda:1,2"])
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a device"):
        parse_device(text)


@pytest.mark.parametrize(
    ("num_gpus", "cores", "target", "draft"),
    [
        (0, {0, 1, 2, 3}, "cpu:0,1", "cpu:2,3"),
        (0, {5}, "cpu:5", "cpu:5"),
        (1, {0, 1}, "cuda:0", "cpu:0,1"),
        (2, {0, 1}, "cuda:0", "cuda:1"),
    ],
)
def test_devices_that_are_not_given(
    num_gpus: int, cores: set[int], target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    assert tuple(map(str, choose_devices(None, None))) == (target, draft)


def test_a_draft_gets_the_cores_that_the_target_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert choose_devices(Device("cpu", (1,)), None)[1] == Device("cpu", (0, 2))
    assert choose_devices(Device("cpu"), None) == (Device("cpu", (0, 1, 2)), Device("cpu", (0, 1, 2)))


def test_devices_that_are_not_here_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 1)
    with pytest.raises(ConfigurationError, match="cuda:1: PyTorch finds 1 GPUs here"):
        choose_devices(None, Device("cuda", index=1))
    with pytest.raises(ConfigurationError, match="not 99999"):
        choose_devices(Device("cpu", (99999,)), None)


def test_a_program_sees_its_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Device("cuda", index=1).environment == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert Device("cuda", index=1).environment == {"CUDA_VISIBLE_DEVICES": "6"}
    assert Device("cpu", (0,)).environment == {}
