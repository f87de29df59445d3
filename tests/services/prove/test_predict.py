"""The prediction: from data sheets on GPUs, from timed steps on CPUs, and by name where there is none."""

from __future__ import annotations

import pytest

from cluster.config.file import load_config
from cluster.planning.hardware import GPUS, find_gpu
from services.prove import predict as prediction
from services.prove.devices import Device
from services.prove.predict import predict
from services.prove.systems import BESIDE, PLAIN, REMOTE
from tests.services.prove.experiments import experiment

FIRST, SECOND = Device("cuda"), Device("cuda", index=1)


def on_gpus(names: dict[Device, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "describe", lambda device: f"{names[device]} ({device})")


def test_every_placement_and_number_of_streams_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus({FIRST: "NVIDIA H100 80GB HBM3", SECOND: "NVIDIA L4"}, monkeypatch)
    forecasts = predict(experiment(target=FIRST, draft=SECOND))
    assert [(one.num_streams, one.system) for one in forecasts] == [
        (n, system) for n in (1, 2) for system in (PLAIN, BESIDE, REMOTE)
    ]
    assert all(one.plan is not None and one.plan.tokens_per_second > 0 for one in forecasts)
    plain, beside = forecasts[:2]
    assert plain.with_acceptance(0.5) is None
    worse, better = beside.with_acceptance(0.1), beside.with_acceptance(0.9)
    assert worse is not None
    assert better is not None
    assert worse.tokens_per_second <= better.tokens_per_second


def test_a_card_without_a_data_sheet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus({FIRST: "NVIDIA H200", SECOND: "NVIDIA T1000"}, monkeypatch)
    why_not = {one.system: one.why_not for one in predict(experiment(target=FIRST, draft=SECOND))}
    assert why_not[PLAIN] == why_not[BESIDE] == ""
    assert "no data sheet of NVIDIA T1000 (cuda:1); it has those of A10G" in why_not[REMOTE]


def test_engines_whose_steps_are_not_timed_are_named() -> None:
    own = experiment(config=load_config(None, ["target.engine=vllm", "draft.drafter=ngram"]))
    assert {one.why_not for one in predict(own)} == {"the planner has no step times of target.engine vllm on a CPU"}


def test_a_fixed_k_is_the_predicted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus({FIRST: "NVIDIA A100-SXM4-40GB"}, monkeypatch)
    settings = ["speculation.controller=fixed", "speculation.num_speculative_tokens=3", "draft.drafter=ngram"]
    plans = [one.plan for one in predict(experiment(target=FIRST, draft=FIRST, config=load_config(None, settings)))]
    assert [plan and plan.round.num_speculative_tokens for plan in plans[:3]] == [0, 3, 3]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10", None),
    ],
)
def test_gpus_by_the_names_that_cuda_gives_them(name: str, expected: str | None) -> None:
    assert find_gpu(name) == (None if expected is None else GPUS[expected])
